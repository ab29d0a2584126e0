"""The tokenizer of a corpus: bytes, a model's file, or a BPE, trained and saved for the next start and the others."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs.errors import RefusedError, UsageError
from stepfs_producer.sources.listing import SourceFile
from stepfs_producer.text.records import TextSource
from stepfs_producer.transforms.model_text import load_model_text
from stepfs_producer.transforms.model_tokenizer import tokenizer_digest
from stepfs_producer.transforms.spec import TokenizerKind
from stepfs_producer.transforms.tokenize import (
    BpeTokenizer,
    ByteTokenizer,
    NotLosslessError,
    Tokenizer,
    load_bpe,
    save_once,
    train_bpe,
)

_TRAINING_BYTES: Final = 64 << 20  # of the beginning of the corpus; whole records, all shards
_log = logging.getLogger("stepfs.produce")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer that a command line asks for."""

    kind: TokenizerKind
    size: int  # of a BPE to be trained
    file: Path | None
    eos: str | None
    pad: str | None

    @property
    def file_digest(self) -> str | None:
        """SHA-256 of the tokenizer's file, if one was named; it exists once `tokenizer` has returned."""
        return (
            None
            if self.kind is TokenizerKind.BYTES or self.file is None
            else tokenizer_digest(str(self.file))
        )

    def tokenizer(self, files: tuple[SourceFile, ...], *, text_field: str) -> Tokenizer:
        """The tokenizer for these files. A BPE is one of ours; another model's file is taken as the model takes it."""
        named = self.eos is not None or self.pad is not None
        if self.kind is TokenizerKind.HUGGINGFACE or (named and self.kind is TokenizerKind.BPE and self.file):
            if self.file is None:
                raise UsageError(
                    "--tokenizer huggingface needs the model's file: --tokenizer-file tokenizer.json"
                )
            return load_model_text(self.file, eos=self.eos, pad=self.pad)
        if named:
            raise UsageError(
                "--eos and --pad name tokens of a model: give --tokenizer huggingface --tokenizer-file tokenizer.json"
            )
        if self.kind is TokenizerKind.BYTES:
            return ByteTokenizer()
        try:
            return bpe_for(files, text_field=text_field, vocabulary=self.size, path=self.file)
        except NotLosslessError:
            if self.file is None:
                raise
            return load_model_text(self.file, eos=None, pad=None)


def bpe_for(
    files: tuple[SourceFile, ...], *, text_field: str, vocabulary: int, path: Path | None
) -> BpeTokenizer:
    """The tokenizer at `path`, by default one named for the corpus in the cache directory."""
    path = path or _cached(files, text_field, vocabulary)
    if not path.exists():
        _log.info("training a BPE of %d ids into %s", vocabulary, path)
        model = train_bpe(_beginning(TextSource(files, text_field=text_field)), vocabulary)
        try:
            save_once(path, model)
        except OSError as error:
            raise RefusedError(
                f"{path}: {error.strerror}; the tokenizer could not be kept, name another --tokenizer-file"
            ) from error
    return load_bpe(path)


def _cached(files: tuple[SourceFile, ...], text_field: str, vocabulary: int) -> Path:
    digest = hashlib.sha256(f"{text_field}\0{vocabulary}\0{_TRAINING_BYTES}".encode())
    for file in files:
        digest.update(f"\0{file.name}\0{Path(file.path).stat().st_size}".encode())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "stepfs" / "tokenizers" / f"{digest.hexdigest()[:32]}.json"


def _beginning(source: TextSource) -> Iterator[bytes]:
    left = _TRAINING_BYTES
    for record in source.records():
        if left <= 0:
            return
        left -= len(record.data)
        yield record.data
