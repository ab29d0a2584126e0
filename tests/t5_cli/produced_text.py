"""`stepfs-produce text` as a program, and the text that is then in a lake."""

from __future__ import annotations

import io
import json
import subprocess
import sysconfig
import tarfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import forked
import lakes
import numpy as np
import safetensors.numpy
import torch
from committed import committed

PROGRAM = str(Path(sysconfig.get_path("scripts")) / "stepfs-produce")
END, PADDING = 256, 257
RAW = ["--slices", 1, "--ext", ".bin", "--seq-len", 48]

produce = partial(lakes.produce, "text")


def produce_in_a_process(lake: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.ran("stepfs_producer", ["text", lake, *arguments], first=forked.one_core)


def ids_of(payload: bytes, ext: str) -> list[int]:
    """The tokens of a file, row after row."""
    if ext == ".bin":
        return np.frombuffer(payload, "<u2").tolist()
    if ext == ".npy":
        return np.load(io.BytesIO(payload))[0].ravel().tolist()
    if ext == ".tar":
        with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
            rows = [archive.extractfile(name) for name in archive if name.name.endswith(".input_ids.npy")]
            return [number for row in rows if row for number in np.load(io.BytesIO(row.read())).tolist()]
    if ext == ".pt":
        return torch.load(io.BytesIO(payload), weights_only=True)["input_ids"].flatten().tolist()
    return safetensors.numpy.load(payload)["input_ids"].ravel().tolist()


def text_in(lake: str, ext: str = ".bin", producer: str | None = None) -> list[int]:
    """The tokens of all steps in the order of the text, without the padding at their end."""
    ids = [
        number
        for name, payloads in committed(lake)
        if producer in {None, name}
        for payload in payloads
        for number in ids_of(payload, ext)
    ]
    while ids and ids[-1] == PADDING:
        ids.pop()
    return ids


def documents_in(ids: list[int]) -> list[bytes]:
    """Byte tokens → documents."""
    assert ids[-1] == END
    ends = [-1, *np.flatnonzero(np.array(ids) == END).tolist()]
    return [bytes(ids[before + 1 : end]) for before, end in pairwise(ends)]


def texts_of(corpus: Path) -> list[bytes]:
    return [text for path in sorted(corpus.iterdir()) if (text := path.read_bytes())]


def refused(done: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("stepfs-produce: ")
    for words in says:
        assert words in done.stderr
    assert done.stderr.count("\n") == 1 or "the plan changed" in done.stderr


def model_file(path: Path, end: str) -> Path:
    """A byte-level BPE as Qwen's, its end of a document above the vocabulary."""
    vocabulary = {chr(byte): byte - 0x21 for byte in range(0x21, 0x7F)} | {"Ġ": 94, "Ċ": 95}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 96, "content": end, **flags}],
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }
        )
    )
    return path
