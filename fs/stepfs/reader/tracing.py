"""`stepfs.trace`: a trace of this process's lakes, beside the profiler's."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stepfs._internal import tracing
from stepfs._internal.tracing import Event, Recording
from stepfs.errors import RefusedError


@contextmanager
def trace(path: str | os.PathLike[str], *, merge: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Write what the lakes of this process do inside the context to `path`, as Chrome's trace events on torch.profiler's clock.

    The loader's workers that are forked inside belong to it, but for the events of their last second. Gzip if `path` ends
    in .gz; `merge`: a file of torch.profiler, read at the end, into a copy of which the events are put. At most 64 MB of
    events: the oldest go, and the file says so.

    `AbsentError`, `RefusedError` for a path that cannot be written, and while another trace is taken; `StepfsError` for a disk
    that is full: then nothing is under the name.
    """
    out = Path(path)
    tracing.check_out(out)
    if tracing.ring is not None:
        raise RefusedError("this process is traced already: end that trace first")
    spool = Path(tempfile.mkdtemp(prefix="stepfs-trace-"))
    ring = tracing.begin(spool)
    try:
        yield
    finally:
        tracing.end()
        if ring.pid == os.getpid():  # else a worker has left the context, too
            try:
                _write(out, ring.events(), ring.lost, spool, None if merge is None else Path(merge))
            finally:
                shutil.rmtree(spool, ignore_errors=True)


def _write(out: Path, events: list[Event], lost: int, spool: Path, merge: Path | None) -> None:
    recording = Recording()
    recording.lost = lost
    recording.add(os.getpid(), f"stepfs, pid {os.getpid()}", events)
    for part in sorted(spool.glob("*.jsonl")):
        lines = part.read_text().splitlines()
        found = []
        for line in lines:
            with suppress(ValueError, TypeError):  # the last one, of a worker that was killed
                found.append(Event(*json.loads(line)))
        recording.add(int(part.stem), f"stepfs, worker pid {part.stem}", found)
    tracing.finish(out, recording, merge)
