"""The BPE of a corpus: from its file, else trained and saved there for the next start and the other producers."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepfs.errors import RefusedError
from stepfs_producer.sources.listing import SourceFile
from stepfs_producer.text.records import TextSource
from stepfs_producer.transforms.tokenize import BpeTokenizer, load_bpe, save_once, train_bpe

_TRAINING_BYTES: Final = 64 << 20  # of the beginning of the corpus; whole records, all shards
_log = logging.getLogger("stepfs.produce")


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
