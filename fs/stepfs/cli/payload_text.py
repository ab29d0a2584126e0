"""The text behind token ids, where there is a tokenizer: bytes, or a tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepfs.cli.failure import say
from stepfs.cli.payload_bytes import reading
from stepfs.errors import AbsentError, UsageError

if TYPE_CHECKING:
    from stepfs.format.payload.arrays import ArrayInfo

Decode = Callable[[Sequence[int]], str]

TOKENS: Final = 256  # that are shown as text
_BYTES: Final = "bytes"
_BYTE_IDS: Final = 256
_IDS_END: Final = 1 << 32  # of the tokenizers library
_IDS: Final = "input_ids"
_INTEGERS: Final = frozenset({"int16", "int32", "int64", "uint8", "uint16", "uint32"})


def ids_array(arrays: Sequence[ArrayInfo]) -> ArrayInfo | None:
    """The array that holds token ids: `input_ids`, or the only one there is."""
    named = [array for array in arrays if array.name.rpartition(".")[2] == _IDS]
    found = named[0] if named else arrays[0] if len(arrays) == 1 else None
    return found if found is not None and found.dtype in _INTEGERS else None


def decoder(given: str | None, recorded: Mapping[str, object]) -> Decode | None:
    """The tokenizer of the option, or of the lake's schema; None if there is none. `UsageError` for one that is none."""
    if given == _BYTES or (given is None and recorded.get("kind") == _BYTES):
        return _decode_bytes
    if given is None:
        return None
    if not given:
        raise UsageError("--tokenizer: is empty; give `bytes`, or the model's tokenizer.json")
    path = Path(given)
    try:
        with reading(path):
            data = path.read_bytes()
    except AbsentError as error:
        raise AbsentError(f"--tokenizer {given}: no such file; give `bytes`, or the model's tokenizer.json") from error
    known = recorded.get("file_sha256")
    if known is not None and known != hashlib.sha256(data).hexdigest():
        say(
            f"stepfs: {path} is not the file that the lake's ids were made with ({recorded.get('identity')}); "
            "the text may be wrong"
        )
    return _model(path, data)


def _decode_bytes(ids: Sequence[int]) -> str:
    return bytes(number for number in ids if 0 <= number < _BYTE_IDS).decode("utf-8", "replace")


def _model(path: Path, data: bytes) -> Decode:
    if find_spec("tokenizers") is None:
        raise UsageError("--tokenizer needs the package tokenizers, which is not installed: pip install 'stepfs[text]'")
    from tokenizers import Tokenizer

    try:
        model = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} is not a tokenizer.json, or is damaged ({reason})") from error

    def decode(ids: Sequence[int]) -> str:
        known = [number for number in ids if 0 <= number < _IDS_END]
        text: str = model.decode(known, skip_special_tokens=False)
        return text

    return decode
