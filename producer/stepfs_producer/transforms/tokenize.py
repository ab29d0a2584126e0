"""Bytes → token ids and back, losslessly.

Both tokenizers know how many source bytes each id stands for, so a packed row can say exactly which bytes are
inside it, and an audit can undo it. Two ids above the vocabulary have width zero: the end of a document and padding.
They are never part of a BPE model's own vocabulary: text that happens to spell a special token stays text.

Rejected: replacing what is not UTF-8 before BPE (loses bytes); every byte has an id of its own in a byte-level
vocabulary, so undecodable bytes are encoded one by one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import AbsentError, MissingPackageError, StepfsError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

Ids = NDArray[np.int32]
VOCABULARY_MIN: Final = 258  # 256 bytes, end, padding
_STRAY: Final = re.compile("([\udc80-\udcff]+)")  # how surrogateescape spells bytes that are not UTF-8


class NotLosslessError(UsageError):
    """The file holds a tokenizer, but not one whose ids can be undone: `model_text` takes it as the model does."""


class Tokenizer(Protocol):
    """What packing needs of a tokenizer."""

    identity: str  # changes whenever the same bytes would get other ids; stands in the producer's position
    vocabulary: int  # number of ids, `end` and `padding` included
    end: int
    padding: int

    def encode(self, data: bytes) -> Ids: ...

    def edges(self, data: bytes, ids: Ids) -> NDArray[np.int64] | None:
        """Where in `data` each of its ids begins, and the end of the last; None where ids do not stand for bytes of it."""
        ...


class LosslessTokenizer(Tokenizer, Protocol):
    """`decode(encode(data)) == data` for any bytes."""

    def decode(self, ids: Ids) -> bytes: ...

    def widths(self, ids: Ids) -> NDArray[np.int64]:
        """Source bytes behind each id; zero for `end` and `padding`."""
        ...


class ByteTokenizer:
    """Ids 0…255 are the bytes themselves."""

    identity = "bytes"
    vocabulary = VOCABULARY_MIN
    end = 256
    padding = 257

    def encode(self, data: bytes) -> Ids:
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Ids) -> bytes:
        return ids[ids < self.end].astype(np.uint8).tobytes()

    def widths(self, ids: Ids) -> NDArray[np.int64]:
        return (ids < self.end).astype(np.int64)

    def edges(self, _data: bytes, ids: Ids) -> NDArray[np.int64]:
        return np.arange(len(ids) + 1, dtype=np.int64)


class BpeTokenizer:
    """A byte-level BPE model of the `tokenizers` library, from its JSON."""

    def __init__(self, model_json: str) -> None:
        _require_library()
        from tokenizers import Tokenizer as Model  # noqa: PLC0415  (optional, and 30 ms)

        self._model: Model = Model.from_str(model_json)
        if self._model.normalizer is not None:
            raise NotLosslessError("the tokenizer has a normalizer, which changes the text; use one without")
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}
        names: list[str] = [
            str(self._model.id_to_token(number)) for number in range(self._model.get_vocab_size())
        ]
        try:
            self._pieces = [bytes(byte_of[character] for character in name) for name in names]
            self._single = [names.index(character) for character in byte_characters()]
        except (KeyError, ValueError) as error:
            raise NotLosslessError(
                "the tokenizer is not a byte-level BPE without special tokens; train one with --tokenizer bpe"
            ) from error
        self.end = len(names)
        self.padding = self.end + 1
        self.vocabulary = self.end + 2
        self.identity = "bpe-" + hashlib.sha256(model_json.encode()).hexdigest()[:16]
        self._widths = np.array([*map(len, self._pieces), 0, 0], dtype=np.int64)

    def encode(self, data: bytes) -> Ids:
        ids = np.array([number for run in self._runs(data) for number in run], dtype=np.int32)
        if int(self.widths(ids).sum()) != len(data):
            raise StepfsError(
                "the tokenizer changes the text it is given (add_prefix_space?); train one with --tokenizer bpe"
            )
        return ids

    def decode(self, ids: Ids) -> bytes:
        return b"".join(self._pieces[number] for number in ids.tolist() if number < self.end)

    def widths(self, ids: Ids) -> NDArray[np.int64]:
        widths: NDArray[np.int64] = self._widths[ids]
        return widths

    def edges(self, _data: bytes, ids: Ids) -> NDArray[np.int64]:
        return edges_of(self.widths(ids))

    def _runs(self, data: bytes) -> Iterator[list[int]]:
        for run in _STRAY.split(data.decode("utf-8", "surrogateescape")):
            if _STRAY.match(run):
                yield [self._single[byte] for byte in run.encode("utf-8", "surrogateescape")]
            else:
                yield list(self._model.encode(run, add_special_tokens=False).ids)


def edges_of(widths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Widths → the offsets before each and behind the last."""
    edges = np.zeros(len(widths) + 1, np.int64)
    np.cumsum(widths, out=edges[1:])
    return edges


def train_bpe(texts: Iterable[bytes], vocabulary: int) -> str:
    """Train a byte-level BPE of `vocabulary` ids (fewer if the texts are small); the model's JSON.

    Deterministic: the same texts in the same order give the same model, so every producer of a corpus gets it.
    """
    _require_library()
    from tokenizers import Tokenizer as Model  # noqa: PLC0415
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    if vocabulary < VOCABULARY_MIN:
        raise UsageError(
            f"a vocabulary of {vocabulary} is too small; the least is {VOCABULARY_MIN}, one id per byte"
        )
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2,
        initial_alphabet=sorted(byte_characters()),
        show_progress=False,
        special_tokens=[],
    )
    model.train_from_iterator((text.decode("utf-8", "replace") for text in texts), trainer)
    model_json: str = model.to_str()
    return model_json


def load_bpe(path: Path) -> BpeTokenizer:
    """The tokenizer in a JSON file of the `tokenizers` library."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such tokenizer file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a tokenizer file, which is JSON in UTF-8 ({error})") from error
    try:
        return BpeTokenizer(text)
    except StepfsError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"{path}: not a tokenizer file ({error})") from error


def save_once(path: Path, model_json: str) -> None:
    """Write a model where other producers may be writing the same one at the same moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`: other users' producers shall read it, too.
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        draft.write_text(model_json, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _require_library() -> None:
    if find_spec("tokenizers") is None:
        raise MissingPackageError(
            "--tokenizer bpe needs the package tokenizers, which is not installed: pip install 'stepfs[text]'"
        )


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, which byte-level vocabularies are spelled in."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(0x100)]
