"""Readers of one mount that must notice nothing of its daemons: `steady_readers MOUNT EXPECTED WAIT` until stdin ends.

Each in a thread of its own, each byte against EXPECTED, a directory with the same files; `.stepfs/wait/WAIT` is opened by
one that waits. Prints what each has done, met and waited for at most. A mapping that breaks ends the process.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

root, expected = Path(sys.argv[1]), Path(sys.argv[2])
files = [path.relative_to(expected) for path in sorted(expected.rglob("*")) if path.is_file()]
content = {path: (expected / path).read_bytes() for path in files}
names = sorted({path.parts[0] for path in files})
over = threading.Event()


def check(got: bytes, path: Path, offset: int = 0, size: int | None = None) -> None:
    want = content[path][offset:] if size is None else content[path][offset : offset + size]
    assert got == want, f"{path} at {offset}: {len(got)} bytes, not the {len(want)} expected"


def opening() -> Iterator[None]:
    """As a map-style dataset: stat, open, read, close."""
    while True:
        path = random.choice(files)
        assert (root / path).stat().st_size == len(content[path])
        with (root / path).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            check(file.read(), path)
        yield


def holding() -> Iterator[None]:
    """A descriptor that was opened under the first daemon."""
    path = files[3]
    held = os.open(root / path, os.O_RDONLY)
    while True:
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = random.randrange(len(content[path]))
        check(os.pread(held, 5000, offset), path, offset, 5000)
        yield


def mapping() -> Iterator[None]:
    """New pages of a mapping."""
    path = files[5]
    held = os.open(root / path, os.O_RDONLY)
    mapped = mmap.mmap(held, len(content[path]), mmap.MAP_SHARED, mmap.PROT_READ)
    while True:
        mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = random.randrange(len(content[path]))
        check(mapped[offset : offset + 100], path, offset, 100)
        yield


def listing() -> Iterator[None]:
    """Listings that stay open over daemons, and whole ones."""
    while True:
        seen = []
        for entry in os.scandir(root):
            seen.append(entry.name)
            yield
        assert sorted(name for name in seen if name in names) == names, seen  # each once
        step = random.choice(names)
        assert sorted(os.listdir(root / step)) == sorted(path.name for path in files if path.parts[0] == step)
        yield


def asking() -> Iterator[None]:
    """Documents, which are made when they are opened."""
    while True:
        assert json.loads((root / ".stepfs/status.json").read_text())["next_step"] >= len(names)
        yield
        step = random.randrange(len(names))
        assert json.loads((root / f".stepfs/steps/{step}.json").read_text())["step"] == step
        yield


def waiting() -> Iterator[None]:
    """An open that lasts longer than the daemon that has read it."""
    said = (root / ".stepfs/wait" / sys.argv[3]).read_text()
    assert said == f"step-{int(sys.argv[3]):09d}\n"
    over.wait()
    yield


def run(reader: Callable[[], Iterator[None]], told: dict[str, object]) -> None:
    done, errors, longest_s = 0, [], 0.0
    steps = reader()
    while not over.is_set():
        began = time.monotonic()
        try:
            next(steps)
            done += 1
        except (OSError, ValueError, AssertionError) as error:
            errors.append(repr(error))
            steps = reader()
        longest_s = max(longest_s, time.monotonic() - began)
        time.sleep(0.005)
    told[reader.__name__] = {
        "done": done,
        "failed": len(errors),
        "errors": errors[:5],
        "longest_s": round(longest_s, 3),
    }


if __name__ == "__main__":
    told: dict[str, object] = {}
    readers = [
        threading.Thread(target=run, args=(reader, told))
        for reader in (opening, holding, mapping, listing, asking, waiting)
    ]
    for thread in readers:
        thread.start()
    sys.stdout.write("reading\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt):
        sys.stdin.read()
    over.set()
    for thread in readers:
        thread.join()
    sys.stdout.write(json.dumps(told))
