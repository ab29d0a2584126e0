"""A lake whose every byte is read by readers of all kinds, while its daemons come and go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from realmount import PATIENCE_S, lake_with, payload

from stepfs_producer import Producer

STEPS, SLICES, SIZE = 12, 2, 200_000
READERS = Path(__file__).parents[1] / "support/steady_readers.py"


def steady_lake(url, tmp_path):
    """A lake, and its files beside it."""
    batches = lake_with(url, STEPS, slices=SLICES, size=SIZE)
    for step, batch in enumerate(batches):
        for rank, data in enumerate(batch):
            path = tmp_path / f"expected/step-{step:09d}/rank-{rank:05d}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return url


@contextmanager
def steady_readers(lake, mount):
    """Readers of all kinds; on leaving, none of them has noticed anything."""
    expected = mount.directory.parent / "expected"
    readers = subprocess.Popen(
        [sys.executable, READERS, mount.directory, expected, str(STEPS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert readers.stdout.readline() == "reading\n"
        yield
        with Producer(lake, producer_id="p0") as producer:
            producer.append([payload(STEPS, rank) for rank in range(SLICES)], position=STEPS)
        mount.wait_for(STEPS)  # before the readers end: one of them waits for it
        said = json.loads(readers.communicate(timeout=PATIENCE_S)[0])
    finally:
        readers.kill()
        readers.communicate()
    assert readers.returncode == 0
    assert all(reader["done"] and not reader["failed"] for reader in said.values()), said


def daemons_of(mount):
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if {b"stepfs.mount.daemon", b"--foreground"} & {*words} and os.fsencode(mount.directory) in words:
                    found.append(int(process.name))
    return found
