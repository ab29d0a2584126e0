"""Reads files and compares their SHA-256 with the given ones; prints a line of JSON per file.

python -m bench_read.programs.check_digests DIGESTS.json plain|mapped SECONDS   in a loop for so many seconds
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
import time
from pathlib import Path


def mapped(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        return hashlib.sha256(pages).hexdigest()


def plain(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    digests: dict[str, str] = json.loads(Path(sys.argv[1]).read_text())
    read = {"plain": plain, "mapped": mapped}[sys.argv[2]]
    stop = time.monotonic() + float(sys.argv[3])
    while time.monotonic() < stop:
        for path, digest in digests.items():
            wrong = error = False
            try:
                wrong = read(Path(path)) != digest
            except OSError:
                error = True
            print(json.dumps({"wrong": wrong, "error": error}), flush=True)


if __name__ == "__main__":
    main()
