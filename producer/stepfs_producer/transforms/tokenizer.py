"""The tokenizer of a plan: bytes, or a model's tokenizer.json as it comes.

Ids of a text do not depend on the texts beside it: workers get groups of any size. Control tokens in a text are text.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from stepfs.errors import AbsentError, MissingPackageError, RefusedError, StepfsError, UsageError
from stepfs_producer.plan.arrays import Ids, Integers
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.sources import Tokenizer as PlanTokenizer
from stepfs_producer.plan.values import NONE
from stepfs_producer.sources.record import RECORD_BYTES_MAX
from stepfs_producer.transforms.documents import Documents, TokenizerSpec, UnfitRecordError, is_of_record

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Model

_ENDS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<EOS>",
    "[EOS]",
)
_PADDINGS: Final = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<PAD>",
    "<｜▁pad▁｜>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
)
_SHOWN: Final = 8

UNSPELLED: Final = "\0stepfs\0"  # before the names that control tokens have here, which no text spells
_FOR_INFERENCE: Final = ("truncation", "padding")
_RANDOM: Final = ("dropout", "alpha", "nbest_size")
_BATCH_CHARACTERS: Final = 1 << 20  # per call of the library, whose results need a hundred bytes per token
_BYTES: Final = 256
TEXT_BYTES_MAX: Final = 4 << 20  # of one text: a longer one alone needs gigabytes
_OPEN_MAX: Final = 16  # tokenizers kept in a process; a plan has one


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a tokenizer's tokens, to find ids by."""

    file: str
    vocabulary: Mapping[str, int]
    special: Sequence[str]

    def special_ids(self, *, eos: str | None, bos: str | None, pad: str | None) -> tuple[int | None, int | None, int]:
        """Ids of EOS and BOS, None: no such token; and of padding, since rows must be filled up.

        None: the end of a document by its usual names, no token at its beginning, padding by its usual names, else
        the end, else 0. `none`: no such token; padding is 0 then. `UsageError` names the nearest token.
        """
        end = self._end() if eos is None else self.id_of("eos", eos)
        begin = None if bos is None else self.id_of("bos", bos)
        if pad is None:
            padding = next((self.vocabulary[name] for name in _PADDINGS if name in self.vocabulary), end)
        else:
            padding = self.id_of("pad", pad)
        return end, begin, padding or 0

    def _end(self) -> int:
        found = [name for name in _ENDS if name in self.vocabulary]
        if len(found) == 1:
            return self.vocabulary[found[0]]
        among = found or list(self.special)
        shown = ", ".join(map(repr, among[:_SHOWN])) + (" …" if len(among) > _SHOWN else "")
        raise UsageError(
            f"{self.file} does not say which token ends a document; name it as eos (of `text`: --eos TOKEN), or give none"
            + (f" (it has {shown})" if among else "")
        )

    def id_of(self, role: str, name: str) -> int | None:
        if name == NONE:
            return None
        if name in self.vocabulary:
            return self.vocabulary[name]
        nearest = _nearest(name, self.special) or _nearest(
            name, [known for known in self.vocabulary if abs(len(known) - len(name)) <= 1]
        )
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise UsageError(f"{self.file}: the {role} token {name!r} is not in its vocabulary{hint}")


def _nearest(name: str, known: Sequence[str]) -> str | None:
    close: Callable[..., list[str]] = difflib.get_close_matches
    return next(iter(close(name, known, n=1, cutoff=0.5)), None)


class Prepared(NamedTuple):
    """A tokenizer's file, for encoding documents."""

    json: str
    names: dict[str, str]  # of its control tokens → those that they have here
    found: bool  # whether each is found wherever it stands: not in the normalised text, nor alone between words
    added: list[str]  # all added tokens, by their names in the file


def prepared(model_json: str, named: Collection[str], *, renamed: bool = True) -> Prepared:
    """Control tokens are the added tokens that are special or `named`. `ValueError`, `TypeError`, `KeyError` or
    `AttributeError` if the JSON is no tokenizer's.
    """
    data: dict[str, Any] = json.loads(model_json)
    model: dict[str, Any] = data["model"]
    for key in _FOR_INFERENCE:
        data[key] = None
    for key in _RANDOM:
        if key in model:
            model[key] = None
    names: dict[str, str] = {}
    added: list[str] = []
    found = True
    for token in data.get("added_tokens") or ():
        added.append(token["content"])
        token["special"] = token["special"] or token["content"] in named
        if token["special"] and token["content"] != _unknown(model):
            found &= not (token.get("single_word") or (token.get("normalized") and data.get("normalizer")))
            names[token["content"]] = UNSPELLED + token["content"] if renamed else token["content"]
            token["content"] = names[token["content"]]
    if renamed:
        _rename(model, names)
    return Prepared(json.dumps(data), names, found, added)


def _unknown(model: dict[str, Any]) -> str | None:
    """The token for unknown characters, which the model looks up by its name."""
    if model.get("unk_id") is not None:
        name: str = model["vocab"][model["unk_id"]][0]
        return name
    return model.get("unk_token")


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if names and model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_parts(merge))]


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


class Tokens(NamedTuple):
    """A text, its ids, and the characters of each: [tokens, 2], first and last + 1."""

    text: str
    ids: Ids
    offsets: Integers

    def places(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """First and last + 1 of the tokens with a character in each span; (0, 0): none."""
        numbers = np.flatnonzero(self.offsets[:, 1] > self.offsets[:, 0])  # with characters, in whose order they stand
        begins, ends = self.offsets[numbers].T
        wanted = np.array(spans, np.int64).reshape(-1, 2)
        firsts = np.searchsorted(ends, wanted[:, 0], side="right")
        lasts = np.searchsorted(begins, wanted[:, 1], side="left")
        some = (lasts > firsts) & (wanted[:, 1] > wanted[:, 0])
        found = np.zeros_like(wanted)
        found[some] = np.column_stack([numbers[firsts[some]], numbers[lasts[some] - 1] + 1])
        return [(first, last) for first, last in found.tolist()]


class Tokenizer(ABC):
    """Texts → token ids. A pure function of each text."""

    identity: str  # changes whenever the same text would get other ids
    vocabulary: int  # ids are below it
    eos: int | None  # closes each document
    bos: int | None  # opens each document
    pad: int
    text_bytes_max = RECORD_BYTES_MAX  # of one text
    ends: str  # for people: the tokens at the ends of documents and of rows, and where each comes from

    @abstractmethod
    def id_of(self, role: str, name: str) -> int | None:
        """The token `name`; None for `none`. `UsageError` names the nearest one that there is."""

    def spelled(self, text: str) -> str | None:  # noqa: ARG002
        """A control token that a text spells."""
        return None

    @abstractmethod
    def name_of(self, number: int) -> str | None:
        """The name of a token that is no text, its number where it has none; None of a text's."""

    @abstractmethod
    def decoded(self, ids: Sequence[int]) -> str:
        """The text of tokens that have no name; U+FFFD for a part of a character."""

    @abstractmethod
    def encode_plain(self, texts: Sequence[str]) -> Documents:
        """The tokens of each text alone. `UnfitRecordError` if the model has none for a character of a text."""


def open_tokenizer(spec: TokenizerSpec, model_json: str = "") -> Tokenizer:
    """The tokenizer of `spec`; `model_json` is the content of its file. `UsageError` if they do not fit."""
    plan = spec.tokenizer
    if plan.file is None:
        return BytesOfText(plan)
    if find_spec("tokenizers") is None:
        raise MissingPackageError(
            f"a tokenizer of kind {plan.kind} needs the package tokenizers, which is not installed: "
            "pip install 'stepfs[produce]'"
        )
    # Workers are processes already; threads of the library would contend with them for the same cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return ModelTokenizer(plan, model_json)
    except UsageError as error:
        raise error if plan.file in str(error) else UsageError(f"{plan.file}: {error}") from error
    except StepfsError:
        raise
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{plan.file} is not a tokenizer.json, or is damaged ({reason or type(error).__name__}); fetch it again"
        ) from error


def pinned(spec: TokenizerSpec) -> TokenizerSpec:
    """The same tokenizer with the digest that its file has now. `AbsentError`, `UsageError`."""
    if spec.file is None:
        return spec
    return replace(spec, digest=hashlib.sha256(_content(spec.file)).hexdigest())


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """`open_tokenizer` with the file's content, kept for the next call.

    `RefusedError` if the file is not the one whose digest the spec has. Without a digest, the file is read each time, so
    that a replaced one is never taken for the one before.
    """
    return _opened(pinned(spec) if spec.digest is None else spec)


@lru_cache(maxsize=_OPEN_MAX)
def _opened(spec: TokenizerSpec) -> Tokenizer:
    if spec.file is None:
        return open_tokenizer(spec)
    content = _content(spec.file)
    if hashlib.sha256(content).hexdigest() != spec.digest:
        raise RefusedError(
            f"{spec.file} changed while the plan was running; restore it, or give a changed tokenizer a new file"
        )
    try:
        return open_tokenizer(spec, content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{spec.file}: not a tokenizer file, which is JSON in UTF-8 ({error})") from error


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except FileNotFoundError as error:
        raise AbsentError(f"{file}: no such tokenizer file; name the tokenizer.json of the model") from error
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}; the tokenizer could not be read") from error


class BytesOfText(Tokenizer):
    """Ids 0…255 are the bytes of UTF-8, 256 ends a document, 257 is padding."""

    def __init__(self, plan: PlanTokenizer) -> None:
        for role, name in (("eos", plan.eos), ("bos", plan.bos), ("pad", plan.pad)):
            if name is not None and name != NONE:
                raise UsageError(
                    f"a tokenizer of kind {plan.kind} has no token {name!r}: its {role} has no name; leave it out, or "
                    "give none"
                )
        self.identity = "bytes"
        self.vocabulary = 258
        self.eos = None if plan.eos == NONE else 256
        self.bos = None
        self.pad = 257
        self.ends = (
            f"ids are bytes of UTF-8; eos {'none' if self.eos is None else self.eos}, bos none, padding {self.pad}"
        )

    def id_of(self, role: str, name: str) -> int | None:
        raise UsageError(
            f"bytes have no {role} token {name!r}; add tokenizer: {{kind: huggingface, file: tokenizer.json}}"
        )

    def name_of(self, number: int) -> str | None:
        return None if 0 <= number < _BYTES else {256: "eos", self.pad: "padding"}.get(number, str(number))

    def decoded(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def encode_plain(self, texts: Sequence[str]) -> Documents:
        data = [text.encode() for text in texts]
        ends = np.cumsum(np.array([len(text) for text in data], np.int64))
        return Documents(Ragged(np.frombuffer(b"".join(data), np.uint8).astype(np.int32), ends))


class ModelTokenizer(Tokenizer):
    """A model's own tokenizer.json."""

    text_bytes_max = TEXT_BYTES_MAX

    def __init__(self, plan: PlanTokenizer, model_json: str) -> None:
        from tokenizers import Tokenizer as Model  # noqa: PLC0415

        named = {name for name in (plan.eos, plan.bos, plan.pad) if name is not None and name != NONE}
        self._as_text = plan.control_tokens != "tokens"
        found = prepared(model_json, named, renamed=self._as_text)
        new_names, self.added = found.names, found.added
        self._model: Model = Model.from_str(found.json)
        self.by_own_names = self._as_text and not found.found
        """Whether the control tokens of a rendered text are found as the file finds them by their own names alone."""
        self.parts_texts = self._as_text and found.found
        """Whether what stands before a control token of a rendered text, and what begins with it, have the ids of the whole."""
        self._own_json = prepared(model_json, named, renamed=False).json if self.by_own_names else ""
        self._model.encode_special_tokens = self._as_text
        self.control_tokens = new_names
        """Control tokens by their names in the file → the names that the model knows here, which no text spells."""
        old_names = {new: old for old, new in new_names.items()}
        vocabulary: dict[str, int] = {
            old_names.get(name, name): number for name, number in self._model.get_vocab().items()
        }
        if not vocabulary:
            raise UsageError("its vocabulary is empty")
        self._controls_by_id = {vocabulary[name]: name for name in new_names if name in vocabulary}
        # Ids may have gaps, and added tokens stand above the model's.
        self.vocabulary = max(vocabulary.values()) + 1
        self._names = Names(str(plan.file), vocabulary, list(new_names))
        self.eos, self.bos, self.pad = self._names.special_ids(eos=plan.eos, bos=plan.bos, pad=plan.pad)
        digest = hashlib.sha256(model_json.encode() + json.dumps([self.eos, self.bos]).encode())
        self.identity = "huggingface-" + digest.hexdigest()[:16]
        self._controls = re.compile("|".join(map(re.escape, longest_first(new_names))) or r"(?!)")
        self.ends = self._ends_text(plan, {number: name for name, number in vocabulary.items()})

    def encode_plain(self, texts: Sequence[str]) -> Documents:
        lengths: list[int] = []
        parts = [np.empty(0, np.int32)]
        for batch in _batches(texts):
            try:
                encodings = self._model.encode_batch_fast(batch, add_special_tokens=False)
            except BaseException as error:
                if not is_of_record(error):
                    raise
                raise _refused(error) from error
            numbers = [encoding.ids for encoding in encodings]
            counts = [len(ids) for ids in numbers]
            parts.append(np.fromiter(chain.from_iterable(numbers), np.int32, sum(counts)))
            lengths += counts
        return Documents(Ragged(np.concatenate(parts), np.cumsum(np.array(lengths, np.int64))))

    def name_of(self, number: int) -> str | None:
        known = self._model.id_to_token(number) if 0 <= number < self.vocabulary else None
        return str(number) if known is None else self._controls_by_id.get(number)

    def decoded(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text

    def id_of(self, role: str, name: str) -> int | None:
        return self._names.id_of(role, name)

    def spelled(self, text: str) -> str | None:
        found = self._controls.search(text)
        return None if found is None else found[0]

    def _ends_text(self, plan: PlanTokenizer, names: Mapping[int, str]) -> str:
        def one(number: int | None, given: str | None) -> str:
            return "none" if number is None else names[number] + ("" if given is None else " (of the plan)")

        own = [names[number] for number in self._model.encode("", add_special_tokens=True).ids if number in names]
        missing = [name for name in own if name not in (names.get(self.bos or -1), names.get(self.eos or -1))]
        advice = f"; the file's own template adds {', '.join(missing)}: name it as bos or eos if the model wants it"
        return (
            f"eos {one(self.eos, plan.eos)}, bos {one(self.bos, plan.bos)}, padding {names.get(self.pad, self.pad)}"
            + (advice if missing else "")
        )

    @cached_property
    def _own_model(self) -> Model:
        from tokenizers import Tokenizer as Model  # noqa: PLC0415

        return Model.from_str(self._own_json)

    def encode_rendered(self, text: str, *, own: bool = False) -> Tokens:
        """A text that may name `control_tokens`. `own`: by their names in the file."""
        model = self._own_model if own else self._model
        model.encode_special_tokens = False
        try:
            found = model.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not is_of_record(error):
                raise
            raise _refused(error) from error
        finally:
            self._model.encode_special_tokens = self._as_text
        if self.by_own_names and not own:
            self._refuse_unfound(text, found)
        offsets = np.fromiter(chain.from_iterable(found.offsets), np.int64).reshape(-1, 2)
        return Tokens(text, np.array(found.ids, np.int32), offsets)

    def _refuse_unfound(self, text: str, encoding: Encoding) -> None:
        """`UnfitRecordError` if a new name of a control token became anything but the token."""
        named = re.compile("|".join(map(re.escape, longest_first(self.control_tokens.values()))))
        for name in named.finditer(text):
            place = encoding.char_to_token(name.start())
            if place is None or encoding.ids[place] != self._model.token_to_id(name[0]):
                raise UnfitRecordError(
                    "a message spells a control token, which this tokenizer cannot tell from the template's; give tokenizer: "
                    "{control_tokens: tokens}, or leave such messages out"
                )


def longest_first(names: Iterable[str]) -> list[str]:
    """The order of alternatives in a pattern, because a name may begin with another one."""
    return sorted(names, key=len, reverse=True)


def _refused(error: BaseException) -> UnfitRecordError:
    """Such as a vocabulary of words that has none for the unknown."""
    return UnfitRecordError(f"the tokenizer refuses the text ({' '.join(str(error).split())})")


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    if batch:
        yield batch
