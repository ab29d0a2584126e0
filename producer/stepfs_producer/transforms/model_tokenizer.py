"""The tokenizer of a plan: bytes, or a model's tokenizer.json as it comes.

A model's file may have any normaliser, pre-tokenizer and vocabulary; text becomes the ids that the model was made for,
without the template that its post-processor would add. See `model_file` for the changes, `special_tokens` for how
the ends of documents are found, and `documents` for where they are put.

Ids of a text do not depend on the texts beside it: workers get groups of any size.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from stepfs.errors import AbsentError, MissingPackageError, RefusedError, StepfsError, UsageError
from stepfs_producer.sources.lines import RECORD_BYTES_MAX
from stepfs_producer.transforms.documents import Documents, UnfitRecordError
from stepfs_producer.transforms.model_file import prepared
from stepfs_producer.transforms.spec import TokenizerSpec
from stepfs_producer.transforms.special_tokens import NONE, Names

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Model

_BATCH_CHARACTERS: Final = 1 << 20  # per call of the library, whose results need a hundred bytes per token
TEXT_BYTES_MAX: Final = 4 << 20  # of one text: a longer one alone needs gigabytes
_OPEN_MAX: Final = 16  # tokenizers kept in a process; a plan has one


class Tokenizer(ABC):
    """Texts → token ids. A pure function of each text."""

    identity: str  # changes whenever the same text would get other ids
    vocabulary: int  # ids are below it
    eos: int | None  # closes each document
    bos: int | None  # opens each document
    pad: int
    text_bytes_max = RECORD_BYTES_MAX  # of one text

    @abstractmethod
    def encode_plain(self, texts: Sequence[str]) -> Documents:
        """The tokens of each text alone. `UnfitRecordError` if the model has none for a character of a text."""


def open_tokenizer(spec: TokenizerSpec, model_json: str = "") -> Tokenizer:
    """The tokenizer of `spec`; `model_json` is the content of its file. `UsageError` if they do not fit."""
    if spec.file is None:
        return BytesOfText(spec)
    if find_spec("tokenizers") is None:
        raise MissingPackageError(
            f"a tokenizer of kind {spec.kind} needs the package tokenizers, which is not installed: "
            "pip install 'stepfs[text]'"
        )
    # Workers are processes already; threads of the library would contend with them for the same cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return ModelTokenizer(spec, model_json)
    except UsageError as error:
        raise error if spec.file in str(error) else UsageError(f"{spec.file}: {error}") from error
    except StepfsError:
        raise
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{spec.file} is not a tokenizer.json, or is damaged ({reason or type(error).__name__}); fetch it again"
        ) from error


def pinned(spec: TokenizerSpec) -> TokenizerSpec:
    """With the digest of its file as it is now. `AbsentError`, `UsageError`."""
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
        raise AbsentError(f"{file}: no such tokenizer file") from error
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror or error}; the tokenizer could not be read") from error


class BytesOfText(Tokenizer):
    """Ids 0…255 are the bytes of UTF-8, 256 ends a document, 257 is padding."""

    def __init__(self, spec: TokenizerSpec) -> None:
        for role, name in (("eos", spec.eos), ("bos", spec.bos), ("pad", spec.pad)):
            if name is not None and name not in NONE:
                raise UsageError(
                    f"a tokenizer of kind {spec.kind} has no token {name!r}: its {role} has no name; leave it out, or "
                    "give none"
                )
        self.identity = "bytes"
        self.vocabulary = 258
        self.eos = None if spec.eos in NONE else 256
        self.bos = None
        self.pad = 257

    def encode_plain(self, texts: Sequence[str]) -> Documents:
        data = [text.encode() for text in texts]
        lengths = np.array([len(text) for text in data], np.int64)
        return Documents(np.frombuffer(b"".join(data), np.uint8).astype(np.int32), lengths)


class ModelTokenizer(Tokenizer):
    """A model's own tokenizer.json."""

    text_bytes_max = TEXT_BYTES_MAX

    def __init__(self, spec: TokenizerSpec, model_json: str) -> None:
        from tokenizers import Tokenizer as Model  # noqa: PLC0415

        named = {name for name in (spec.eos, spec.bos, spec.pad) if name is not None and name not in NONE}
        changed, new_names = prepared(model_json, named)
        self._model: Model = Model.from_str(changed)
        self._model.encode_special_tokens = True
        old_names = {new: old for old, new in new_names.items()}
        vocabulary: dict[str, int] = {
            old_names.get(name, name): number for name, number in self._model.get_vocab().items()
        }
        if not vocabulary:
            raise UsageError("its vocabulary is empty")
        # Ids may have gaps, and added tokens stand above the model's.
        self.vocabulary = max(vocabulary.values()) + 1
        names = Names(str(spec.file), vocabulary, list(new_names))
        self.eos, self.bos, self.pad = names.special_ids(eos=spec.eos, bos=spec.bos, pad=spec.pad)
        digest = hashlib.sha256(model_json.encode() + json.dumps([self.eos, self.bos]).encode())
        self.identity = "huggingface-" + digest.hexdigest()[:16]

    def encode_plain(self, texts: Sequence[str]) -> Documents:
        lengths: list[int] = []
        parts = [np.empty(0, np.int32)]
        for batch in _batches(texts):
            try:
                encodings = self._model.encode_batch_fast(batch, add_special_tokens=False)
            except Exception as error:  # such as a vocabulary of words that has none for the unknown
                said = " ".join(str(error).split())
                raise UnfitRecordError(f"the tokenizer refuses the text ({said})") from error
            numbers = [encoding.ids for encoding in encodings]
            counts = [len(ids) for ids in numbers]
            parts.append(np.fromiter(chain.from_iterable(numbers), np.int32, sum(counts)))
            lengths += counts
        return Documents(np.concatenate(parts), np.array(lengths, np.int64))


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
