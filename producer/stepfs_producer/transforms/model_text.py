"""A model's tokenizer.json for `stepfs-produce text`: the model's own ids, and its own end of a document.

Spans of text say which bytes stand where. For byte-level models that is known, because each id stands for bytes: a
document whose ids, undone, are its bytes has exact edges. A normaliser or an added token may have changed the text;
then, and for all other models, the edges of a document are not known and its spans are the whole record's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs_producer.transforms.model_tokenizer import ModelTokenizer, load_tokenizer
from stepfs_producer.transforms.spec import TokenizerKind, TokenizerSpec
from stepfs_producer.transforms.tokenize import Ids, byte_characters, edges_of

_STRAY: Final = re.compile("([\udc80-\udcff]+)")  # how surrogateescape spells bytes that are not UTF-8


class ModelText:
    """A `Tokenizer` of a model's file. Bytes that are not UTF-8 are ids of their own, or U+FFFD in models without."""

    def __init__(self, model: ModelTokenizer) -> None:
        if model.eos is None:
            raise UsageError("text marks the end of each document; name the token with --eos")
        self._model = model
        self.identity = model.identity
        self.vocabulary = model.vocabulary
        self.end = model.eos
        self.padding = model.pad
        self._pieces = _pieces(model)
        self._single = {}
        if self._pieces:
            self._widths = np.array([len(piece) for piece in self._pieces], np.int64)
            self._single = {piece[0]: number for number, piece in enumerate(self._pieces) if len(piece) == 1}
        self._has_all_bytes = len(self._single) == 256

    def encode(self, data: bytes) -> Ids:
        if not self._has_all_bytes:
            return self._model.encode_plain([data.decode("utf-8", "replace")]).ids
        return np.concatenate([np.empty(0, np.int32), *self._runs(data)])

    def edges(self, data: bytes, ids: Ids) -> NDArray[np.int64] | None:
        if not self._pieces or b"".join([self._pieces[number] for number in ids.tolist()]) != data:
            return None
        return edges_of(self._widths[ids])

    def _runs(self, data: bytes) -> Iterator[Ids]:
        for run in _STRAY.split(data.decode("utf-8", "surrogateescape")):
            if _STRAY.match(run):
                stray = run.encode("utf-8", "surrogateescape")
                yield np.array([self._single[byte] for byte in stray], np.int32)
            elif run:
                yield self._model.encode_plain([run]).ids


def load_model_text(path: Path, *, eos: str | None, pad: str | None) -> ModelText:
    """The tokenizer in a model's tokenizer.json. Errors: see `load_tokenizer`."""
    model = load_tokenizer(TokenizerSpec(TokenizerKind.HUGGINGFACE, str(path), eos=eos, pad=pad))
    assert isinstance(model, ModelTokenizer)
    return ModelText(model)


def _pieces(model: ModelTokenizer) -> list[bytes]:
    """The bytes behind each id of a byte-level model; none for other models."""
    if not model.byte_level:
        return []
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    pieces = [b""] * model.vocabulary
    for name, number in model.names.items():
        if number in model.added:
            pieces[number] = name.encode()
        elif all(character in byte_of for character in name):
            pieces[number] = bytes(byte_of[character] for character in name)
    return pieces
