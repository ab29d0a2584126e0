"""Corpora on disk, and plans over them: real texts as JSONL and a tokenizer trained on them; synthetic ones as Parquet."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from bench.machine import MIB
from bench_plan.lengths import BYTES_PER_TOKEN, code_files, lognormal, prose_texts
from quickstart.corpus import EOS, train_bpe

SHARD_BYTES = 4 << 20
TRAINED_ON = 4000  # texts
VOCABULARY = 8192
LETTERS = b"etaoinshrdlu    "


def write_corpora(directory: Path, code_bytes: int, prose_bytes: int) -> None:
    """`code/` and `prose/` with JSONL files of so many bytes in all."""
    _write(directory / "code", _texts(code_files()), code_bytes)
    _write(directory / "prose", prose_texts(), prose_bytes)


def write_bpe(path: Path) -> None:
    """A BPE of the same texts."""
    texts = [*islice(prose_texts(), TRAINED_ON), *islice(_texts(code_files()), TRAINED_ON // 20)]
    train_bpe(path, texts, VOCABULARY, [EOS])


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


def write_parquet(directory: Path, files: int, groups: int) -> list[Path]:
    """Synthetic texts of lognormal lengths: so many files of so many row groups of 1 MiB, a source each."""
    import pyarrow as pa  # noqa: PLC0415 - not every part of the benchmark needs it
    from pyarrow.parquet import ParquetWriter  # noqa: PLC0415

    directory.mkdir()
    letters = np.random.default_rng(1).choice(np.frombuffer(LETTERS, np.uint8), 2 * MIB).tobytes().decode()
    sizes = np.minimum(lognormal(2, 100_000) * BYTES_PER_TOKEN, MIB // 4).tolist()
    schema = pa.schema([("text", pa.string())])
    paths = [directory / f"{number:03}.parquet" for number in range(files)]
    for number, path in enumerate(paths):
        size = itertools.cycle(sizes[number:])
        with ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for group in range(groups):
                texts, held = [], 0
                while held < MIB:
                    texts.append(letters[(begin := (group * 977 + held) % MIB) : begin + next(size)])
                    held += len(texts[-1])
                writer.write_table(pa.table({"text": texts}, schema=schema))
    return paths


PARQUET_PLAN = """
version: 1
output: {{ext: .npy, mesh: "dp=8", sequence_length: 4096, micro_batch_tokens: {tokens}}}
tokenizer: {{kind: bytes}}
defaults: {{shuffle: {{block: {block}}}}}
sources:
{sources}
mix: {{{mix}}}
"""


def parquet_plan(paths: list[Path], sources: int, block: str, micro_batch_tokens: int) -> str:
    """A plan of so many sources, one file each; several sources may be over the same file."""
    names = {f"s{number:03}": paths[number % len(paths)] for number in range(sources)}
    lines = [f"  {name}: {{format: parquet, files: {path}, text_field: text}}" for name, path in names.items()]
    return PARQUET_PLAN.format(
        block=block,
        tokens=micro_batch_tokens,
        sources="\n".join(lines),
        mix=", ".join(f"{name}: 1" for name in names),
    )
