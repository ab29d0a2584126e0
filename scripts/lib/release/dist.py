"""dist/: the files of the newest release and their sums. The sums are there if, and only if, the release is whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SUMS: Final = "SHA256SUMS"


def publish(files: Sequence[Path], directory: Path) -> dict[str, str]:
    """Put the files into dist/; returns their SHA-256 sums by name. A kill leaves no sums, or those of whole files."""
    directory.mkdir(exist_ok=True)
    sums = directory / SUMS
    sums.unlink(missing_ok=True)
    found = {}
    for file in files:
        _replace(directory / file.name, file.read_bytes())
        found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    _replace(sums, "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items())).encode())
    return found


def _replace(path: Path, body: bytes) -> None:
    new = path.with_name(f".new-{path.name}")
    new.write_bytes(body)
    new.replace(path)
