"""Files of a source in formats that a library or Megatron writes."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TEXTS = [f"{number} " + "grüße 日本 " * (number % 7) for number in range(300)]


def json_lines(texts: Sequence[str] = TEXTS) -> bytes:
    return "".join(json.dumps({"text": text, "n": len(text)}) + "\n" for text in texts).encode()


def write_gzip(path: Path, texts: Sequence[str] = TEXTS) -> Path:
    data, path = json_lines(texts), path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(data[:5000]) + gzip.compress(data[5000:]))  # members, as bgzip and cat make them
    return path


def write_megatron(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 8, *, modes: bool = False
) -> Path:
    dtype = {4: "<i4", 5: "<i8", 8: "<u2"}[code]
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    width = np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], np.cumsum(lengths.astype("<i8") * width)[:-1]])[: len(lengths)].astype("<i8")
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    tail = bytes(len(lengths)) if modes else b""
    (path / "a.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes() + tail)
    (path / "a.bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))
    return path / "a.bin"
