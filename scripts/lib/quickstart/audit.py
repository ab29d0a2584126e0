"""The exactly-once check: rank files and sources are all it needs to see that every byte was published once.

Each file says in `spans` which tokens of which record stand where. Putting all of them together must give every file that
the given globs match, whole, with no byte missing, twice, or from elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from spans_audit import joined, read_mount

END = 256  # of a document, in byte tokens


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found; `faults` is empty when every source byte appeared exactly once."""

    files: int
    source_bytes: int
    faults: tuple[str, ...]


def audit(mount: Path, corpus: list[str]) -> Audit:
    """Read every step under `mount` and compare with the files of `corpus` (globs), which a plan lists in this order."""
    steps = sorted(path.name for path in mount.glob("step-*"))
    faults = [f"step {n} is missing" for n, name in enumerate(steps) if name != f"step-{n:09d}"][:1]
    ranks, records = read_mount(mount)
    found: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for (_, (_, file, offset)), pieces in records.items():
        ids = joined(pieces)
        if ids is None or ids[-1:] != [END]:
            faults.append(f"file {file} at byte {offset}: tokens missing or twice")
        else:
            found[file].append((offset, bytes(ids[:-1])))
    total = 0
    for number, path in enumerate(listed(corpus)):
        expected = path.read_bytes()
        total += len(expected)
        faults += [f"{path}: {fault}" for fault in compare(sorted(found.pop(number, [])), expected)]
    faults += [f"file {number}: not among the sources" for number in found]
    return Audit(ranks, total, tuple(faults))


def compare(found: list[tuple[int, bytes]], expected: bytes) -> list[str]:
    faults = []
    at = 0
    for offset, data in found:
        if offset != at:
            faults.append(f"bytes {min(at, offset)} to {max(at, offset)} {'missing' if offset > at else 'twice'}")
        at = offset + len(data)
    if at != len(expected):
        faults.append(f"ends at byte {at} of {len(expected)}")
    if not faults and b"".join(data for _, data in found) != expected:
        faults.append("other bytes than in the source")
    return faults


def listed(corpus: list[str]) -> list[Path]:
    """The files in the order of a plan's listing: by number of the glob and name of the file."""
    found = {
        f"{number}/{path.name}".encode(): path
        for number, files in enumerate(map(Path, corpus))
        for path in files.parent.glob(files.name)
    }
    return [found[name] for name in sorted(found)]
