"""The exactly-once check: rank files and sources are all it needs to see that every byte was published once.

Each file says in `spans` which bytes of which document its tokens are. Putting all of them together must give every
text file under the given directories, whole, with no byte missing, twice, or from elsewhere.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found; `faults` is empty when every source byte appeared exactly once."""

    steps: int
    files: int
    documents: int
    source_bytes: int
    faults: tuple[str, ...]


def audit(mount: Path, corpus: list[Path]) -> Audit:
    """Read every step under `mount`, one after the other, and compare with the files of `corpus` (directories)."""
    pieces: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    steps = sorted(path for path in mount.iterdir() if path.name.startswith("step-"))
    faults = [f"step {n} is missing" for n, path in enumerate(steps) if path.name != f"step-{n:09d}"][:1]
    files = 0
    for step in steps:
        for rank in sorted(step.iterdir()):
            collect(rank, pieces)
            files += 1
    sources = text_files(corpus)
    faults += [f"{name}: not among the sources" for name in pieces.keys() - sources.keys()]
    total = 0
    for name, path in sources.items():
        expected = path.read_bytes()
        total += len(expected)
        faults += [f"{name}: {fault}" for fault in compare(sorted(pieces.get(name, [])), expected)]
    return Audit(len(steps), files, len(pieces), total, tuple(faults))


def collect(path: Path, pieces: dict[str, list[tuple[int, bytes]]]) -> None:
    with safe_open(path, framework="np") as batch:
        spans, input_ids = batch.get_tensor("spans"), batch.get_tensor("input_ids")
        sources = json.loads(batch.metadata()["sources"])
    for row, column, count, source, offset, size in spans.tolist():
        ids = input_ids[row, column : column + count]
        data = bytes(ids[ids < 256].tolist())  # byte-level tokens; 256 closes a document, 257 is padding
        if len(data) != size:
            raise ValueError(f"{path}: a span of {size} bytes holds {len(data)}")
        if size:
            pieces[sources[source]].append((offset, data))


def compare(found: list[tuple[int, bytes]], expected: bytes) -> list[str]:
    faults = []
    at = 0
    for offset, data in found:
        if offset != at:
            faults.append(
                f"bytes {min(at, offset)} to {max(at, offset)} {'missing' if offset > at else 'twice'}"
            )
        at = offset + len(data)
    if at != len(expected):
        faults.append(f"ends at byte {at} of {len(expected)}")
    if not faults and b"".join(data for _, data in found) != expected:
        faults.append("other bytes than in the source")
    return faults


def text_files(corpus: list[Path]) -> dict[str, Path]:
    """Name as the producers give it → path, for every file that has text in it."""
    base = corpus[0] if len(corpus) == 1 else os.path.commonpath([directory.parent for directory in corpus])
    found = {}
    for directory in corpus:
        for folder, _, names in os.walk(directory):
            for path in (Path(folder) / name for name in names):
                if b"\0" not in path.read_bytes()[:8192] and path.stat().st_size:
                    found[os.path.relpath(path, base)] = path
    return found
