"""A function of the user's, `module:function`: one record → text or token ids, or None to leave the record out.

    def render(record, key): ...

`record` is a dict (whole records, with bytes where the source has them, and an `images.Image` in place of each image that
the plan names), a str (text), an int32 array (token ids), or with a mask beside them a dict of `input_ids` and
`loss_mask`. `key` is given to functions that
have a parameter of that name: 16 bytes of the record's own, which change from epoch to epoch, as the seed of whatever
is drawn at random. The result is one of

    None                                 the record gives no sample
    "text"                               to be tokenised
    [5, 7, 9]                            token ids: any sequence or array of integers
    ([5, 7, 9], [0, 1, 1])               ids, and 0 where the loss ignores the token
    {"input_ids": …, "loss_mask": …}     the same; or "labels", which are the ids, and -100 where the loss ignores them
                                         (assistant_masks and completion_mask are loss_mask; another key is refused)
    {"input_ids": …, "columns": {…}}     beside ids (and mask, or in place of ids "text"): by name, numpy arrays [rows, …]
                                         of the columns that the plan declares, in their dtypes and shapes

It must depend on its arguments alone: records are transformed in groups of any size, in any process, and again after
a restart.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import StepfsError, UsageError
from stepfs_producer.payloads.step import ColumnSpec
from stepfs_producer.plan.arrays import IGNORED, Ids, Mask
from stepfs_producer.transforms.documents import UnfitRecordError, is_of_record

_REASON_CHARACTERS_MAX: Final = 200

_MASKS: Final = ("loss_mask", "assistant_masks", "completion_mask", "labels")  # the names of transformers and trl, too
_KEYS: Final = ("input_ids", "text", *_MASKS, "attention_mask", "columns")


@dataclass(frozen=True, slots=True)
class UserSample:
    """A sample, as a function returned it."""

    content: str | Ids
    mask: Mask | None = None
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)


class UserFunction:
    """`module:function`, found. `UsageError` if it is not there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._call = function_of(name)
        try:
            self._wants_key = "key" in inspect.signature(self._call).parameters
        except (TypeError, ValueError):  # some functions written in C have no signature
            self._wants_key = False

    def __call__(
        self, record: object, key: bytes, vocabulary: int, columns: Sequence[ColumnSpec] = ()
    ) -> UserSample | None:
        """The result of the function for a record: text, or ids below `vocabulary`, and columns beside them.

        `UnfitRecordError` if it raises or returns something else. Errors of the operating system are not about
        the record, so they end the task: `StepfsError`.
        """
        try:
            result = self._call(record, key=key) if self._wants_key else self._call(record)
        except StepfsError:
            raise
        except (OSError, MemoryError, ImportError) as error:
            raise StepfsError(
                f"the function {self.name} failed: {_described(error)}; this is not the record's fault, so the plan stops"
            ) from error
        except SystemExit as error:
            raise StepfsError(
                f"the function {self.name} ended its process ({_described(error)}); let it return a sample, or raise an error "
                "of the record"
            ) from error
        except BaseException as error:
            if not is_of_record(error):
                raise
            raise UnfitRecordError(f"{self.name} raised {_described(error)}") from error
        try:
            return _read(result, vocabulary, columns)
        except UnfitRecordError as error:
            raise UnfitRecordError(f"{self.name} returned {error}") from error


@lru_cache
def user_function(name: str) -> UserFunction:
    return UserFunction(name)


def checked_ids(ids: object, vocabulary: int) -> Ids:
    """Any sequence of token ids as int32. `UnfitRecordError` if it is none, or an id is not below `vocabulary`."""
    array = _integers(ids, "ids")
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= vocabulary):
        wrong = array[(array < 0) | (array >= vocabulary)][0]
        raise UnfitRecordError(f"the id {wrong}, but the ids of the tokenizer are 0 to {vocabulary - 1}")
    return array.astype(np.int32)


def function_of(name: str) -> Callable[..., object]:
    """What `module:function` names. `UsageError` if it cannot be imported, is not there, or cannot be called."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise UsageError(f"{name!r}: write module:function, such as my_sft:render")
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)  # where a plan's own modules stand; installed ones come first
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        where = "" if missing == module_name.partition(".")[0] else f" for {module_name}"
        raise UsageError(
            f"{name}: no module {missing!r}{where} in {here} or on PYTHONPATH; start where it is, or set PYTHONPATH"
        ) from error
    except Exception as error:
        raise UsageError(f"{name}: importing {module_name} raised {_described(error)}") from error
    value: object = module
    for part in function_name.split("."):
        if not hasattr(value, part):
            raise UsageError(f"{name}: {module_name} has no {function_name!r}{_meant(part, dir(value))}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"{name}: {function_name} is no function, but of type {type(value).__name__}")
    return value


def _read(result: object, vocabulary: int, columns: Sequence[ColumnSpec]) -> UserSample | None:
    if result is None:
        return None
    if isinstance(result, str):
        return UserSample(result)
    if isinstance(result, Mapping):
        return _read_mapping(result, vocabulary, columns)
    if isinstance(result, tuple) and len(result) == 2 and not all(map(_is_integer, result)):
        ids = checked_ids(result[0], vocabulary)
        return UserSample(ids, None if result[1] is None else _mask(result[1], len(ids)))
    return UserSample(checked_ids(result, vocabulary))


def _read_mapping(result: Mapping[Any, object], vocabulary: int, columns: Sequence[ColumnSpec]) -> UserSample:
    for name in result:
        if name not in _KEYS:
            raise UnfitRecordError(
                f"the unknown key {name!r}{_meant(str(name), _KEYS) or '; known: ' + ', '.join(_KEYS)}"
            )
    beside = _columns(result.get("columns"), columns)
    masks = [name for name in _MASKS if result.get(name) is not None]
    if isinstance(text := result.get("text"), str):
        if more := ["input_ids"] * ("input_ids" in result) + masks:
            raise UnfitRecordError(f"both 'text' and {more[0]!r}; return one")
        return UserSample(text, None, beside)
    if "input_ids" not in result:
        raise UnfitRecordError(f"a mapping without 'input_ids'; its keys are {sorted(map(str, result))[:8]}")
    ids = checked_ids(result["input_ids"], vocabulary)
    if len(masks) > 1:
        raise UnfitRecordError(f"both {masks[0]!r} and {masks[1]!r}; return one")
    attended = result.get("attention_mask")
    if attended is not None and not _mask(attended, len(ids)).all():
        raise UnfitRecordError("an 'attention_mask' with zeros; return ids without padding")
    if not masks:
        return UserSample(ids, None, beside)
    values = result[masks[0]]
    return UserSample(ids, mask_of_labels(values, ids) if masks[0] == "labels" else _mask(values, len(ids)), beside)


def _columns(given: object, specs: Sequence[ColumnSpec]) -> dict[str, NDArray[Any]]:
    """Copies of the arrays, of exactly the declared dtypes and shapes."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UnfitRecordError(f"columns of type {type(given).__name__}; return arrays by name")
    declared = {spec.name: spec.column for spec in specs}
    found = {}
    for name, values in given.items():
        column = declared.get(name)
        if column is None:
            advice = _meant(str(name), declared) or "; declare it in output.columns"
            raise UnfitRecordError(f"the column {name!r}, which the plan does not declare{advice}")
        try:
            array = np.array(values)
        except (TypeError, ValueError) as error:
            raise UnfitRecordError(f"the column {name!r} that is no array ({error})") from error
        if array.dtype != np.dtype(column.dtype) or array.ndim == 0 or array.shape[1:] != column.shape:
            wanted = ", ".join(map(str, ("rows", *column.shape)))
            raise UnfitRecordError(
                f"the column {name!r} as {array.dtype} {list(array.shape)}, declared as {column.dtype} [{wanted}]"
            )
        found[name] = array
    return found


def mask_of_labels(labels: object, ids: Ids) -> Mask:
    """0 where a label is -100. `UnfitRecordError` unless the other labels are the ids, each in its own place."""
    array = _integers(labels, "labels")
    if len(array) != len(ids):
        raise UnfitRecordError(f"{len(array)} labels for {len(ids)} ids")
    wrong = np.flatnonzero((array != IGNORED) & (array != ids))
    if len(wrong):
        place = int(wrong[0])
        raise UnfitRecordError(
            f"the label {array[place]} at place {place}, where the id is {ids[place]}; a label is the id of its own place "
            f"(shifting is the output's business), or {IGNORED}"
        )
    return np.asarray(array != IGNORED, np.uint8)


def _mask(mask: object, length: int) -> Mask:
    array = _integers(mask, "mask")
    if len(array) != length:
        raise UnfitRecordError(f"a mask of {len(array)} for {length} ids")
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) <= 1:
        raise UnfitRecordError("a mask with other values than 0 and 1")
    return array.astype(np.uint8)


def _integers(values: object, what: str) -> np.ndarray[tuple[int], np.dtype[np.integer[Any]]]:
    if isinstance(values, bytes | bytearray | str) or not (
        isinstance(values, Sequence) or hasattr(values, "__array__")
    ):
        raise UnfitRecordError(f"{what} of type {type(values).__name__}; return a sequence of integers")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise UnfitRecordError(f"{what} that are no flat sequence of integers ({error})") from error
    if array.ndim == 1 and not array.size:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "biu":
        raise UnfitRecordError(
            f"{what} of type {array.dtype} and shape {array.shape}; return a flat sequence of integers"
        )
    if array.dtype.kind == "b" and what != "mask":
        raise UnfitRecordError(f"{what} of type bool; return integers")
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer)


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_REASON_CHARACTERS_MAX]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
