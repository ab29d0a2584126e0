"""Corpora of real texts as JSONL, a tokenizer trained on them, and plans over them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from bench_plan.lengths import code_files, prose_texts
from stepfs_producer.transforms.tokenize import train_bpe

SHARD_BYTES = 4 << 20
TRAINED_ON = 4000  # texts
VOCABULARY = 8192


def write_corpora(directory: Path, code_bytes: int, prose_bytes: int) -> None:
    """`code/` and `prose/` with JSONL files of so many bytes in all."""
    _write(directory / "code", _texts(code_files()), code_bytes)
    _write(directory / "prose", prose_texts(), prose_bytes)


def write_bpe(path: Path) -> None:
    """A BPE of the same texts."""
    texts = [*islice(prose_texts(), TRAINED_ON), *islice(_texts(code_files()), TRAINED_ON // 20)]
    path.write_text(train_bpe((text.encode() for text in texts), VOCABULARY), encoding="utf-8")


def _texts(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text:
            yield text


def _write(directory: Path, texts: Iterable[str], total: int) -> None:
    directory.mkdir(parents=True)
    left, shard = total, 0
    lines: list[bytes] = []
    held = 0
    for text in texts:
        line = json.dumps({"text": text}).encode() + b"\n"
        lines.append(line)
        held += len(line)
        left -= len(line)
        if held >= SHARD_BYTES or left <= 0:
            (directory / f"{shard:04}.jsonl").write_bytes(b"".join(lines))
            lines, held, shard = [], 0, shard + 1
        if left <= 0:
            return
    (directory / f"{shard:04}.jsonl").write_bytes(b"".join(lines))
