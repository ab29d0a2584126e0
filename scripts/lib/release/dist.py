"""dist/: the files of the newest release and their sums. The sums are there if, and only if, the release is whole."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stepfs.errors import RefusedError

SUMS: Final = "SHA256SUMS"


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Hold dist/ for one release. `RefusedError` while another one does."""
    directory.mkdir(exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(
                f"another scripts/release writes to {directory}: wait until it has ended"
            ) from None
        yield


def publish(files: Sequence[Path], directory: Path) -> dict[str, str]:
    """Put the files into dist/; returns their SHA-256 sums by name. A kill leaves no sums, or those of whole files."""
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
