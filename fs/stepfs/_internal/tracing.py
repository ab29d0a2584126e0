"""Events of a trace: kept in a ring while somebody traces, and written as Chrome's trace events, as torch.profiler does.

`ring` is None unless somebody traces, so that a place of the code pays one `if`. Times are those of the profiler: nanoseconds
of the machine's clock. Events overlap only on rows of one track that are added here, because viewers want them nested.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError

TRACE_BYTES_MAX: Final = 64 << 20  # of the events in a file
_EVENTS_MAX: Final = 200_000  # in memory, about 300 bytes each
WINDOW_S: Final = 10.0  # of events that a daemon gives at a time
_WANTED_S: Final = 10.0  # from the last request for events on
_ROW_MIN: Final = 2_000_000_000  # numbers of rows, which are no thread's
_NS_PER_US: Final = 1000
_BASE_NS: Final = 7_889_238 * 1_000_000_000  # Kineto counts from a multiple of this, so that doubles hold nanoseconds

ring: Ring | None = None


class Event(NamedTuple):
    """One event; `ns`: when it began, since 1970."""

    number: int
    track: str
    name: str
    ns: int
    ns_long: int
    facts: Mapping[str, Any]


class Ring:
    """The newest events of this process."""

    def __init__(self, spool: Path | None = None) -> None:
        """`spool`: a directory for the events of processes that were forked from this one."""
        self.pid, self.spool = os.getpid(), spool
        self.wanted_until = float("inf")  # of the monotonic clock
        self._events: deque[Event] = deque(maxlen=_EVENTS_MAX)
        self._number = 0

    def add(self, track: str, name: str, seconds: float = 0.0, **facts: object) -> None:
        """Something that has just ended, after so long."""
        ns_long = round(seconds * 1e9)
        self._number += 1
        self._events.append(Event(self._number, track, name, time.time_ns() - ns_long, ns_long, facts))

    def events(self) -> list[Event]:
        return list(self._events)

    def take(self) -> list[Event]:
        found = self.events()
        self._events.clear()
        return found

    @property
    def lost(self) -> int:
        """Events that had no room."""
        return self._number - len(self._events)

    def spill(self) -> None:
        """In a process that was forked: what it has, into a file for the one that writes the trace."""
        if self.spool is not None and self.pid != os.getpid() and self._events:
            lines = "".join(json.dumps(event) + "\n" for event in self.take())
            try:
                with (self.spool / f"{os.getpid()}.jsonl").open("a") as file:
                    file.write(lines)
            except OSError:  # the trace is over, as a rule
                self.wanted_until = 0.0


def begin(spool: Path | None = None) -> Ring:
    """Trace from now on."""
    global ring  # noqa: PLW0603 - there is one process
    ring = Ring(spool)
    return ring


def end() -> None:
    global ring  # noqa: PLW0603
    ring = None


def _after_fork() -> None:
    if ring is not None:
        ring.take()  # the parent's


os.register_at_fork(after_in_child=_after_fork)


def look() -> None:
    """Called now and then by who adds events: end a trace that nobody asks for any more; hand on those of a fork."""
    if ring is not None:
        ring.spill()
        if time.monotonic() > ring.wanted_until:
            end()


def wanted() -> str:
    """The events of the last seconds, as lines of JSON below one that says whose; traces on for some seconds from now."""
    found = ring or begin()
    found.wanted_until = time.monotonic() + _WANTED_S
    since_ns = time.time_ns() - round(WINDOW_S * 1e9)
    recent = [event for event in found.events() if event.ns + event.ns_long >= since_ns]
    head = {"pid": os.getpid(), "now_ns": time.time_ns()}
    return "".join(json.dumps(line) + "\n" for line in (head, *recent))


class Recording:
    """The events of a trace until it is written; beyond the bound the oldest go."""

    def __init__(self, bytes_max: int = TRACE_BYTES_MAX) -> None:
        self._bytes_max, self._bytes, self.lost = bytes_max, 0, 0
        self._kept: deque[tuple[int, int, Event]] = deque()  # process, size, event
        self._seen: dict[int, int] = {}  # by process: the greatest number
        self.names: dict[int, str] = {}  # of the processes

    @property
    def count(self) -> int:
        return len(self._kept)

    def skip(self, pid: int, name: str, events: Iterable[Event]) -> None:
        """These were before the trace."""
        self.names.setdefault(pid, name)
        self._seen[pid] = max((event.number for event in events), default=0)

    def add(self, pid: int, name: str, events: Iterable[Event]) -> None:
        """Those of a process that are new. A gap in their numbers is counted as lost."""
        seen = self._seen.get(pid)
        self.names.setdefault(pid, name)
        for event in events:
            if seen is not None and event.number <= seen:
                continue
            self.lost += 0 if seen is None else event.number - seen - 1
            seen = event.number
            size = 160 + len(event.track) + len(event.name) + len(json.dumps(event.facts))
            self._kept.append((pid, size, event))
            self._bytes += size
        while self._bytes > self._bytes_max:
            self._bytes -= self._kept.popleft()[1]
            self.lost += 1
        self._seen[pid] = seen or 0

    def note(self, pid: int, name: str, **facts: object) -> None:
        """An event that whoever records has noticed."""
        self._kept.append((pid, 0, Event(0, "trace", name, time.time_ns(), 0, facts)))

    def document(self, merged: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a viewer reads. `merged`: a file of torch.profiler, whose events come first, and whose base of time holds."""
        found: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": [], **(merged or {})}
        if merged is None:
            found["baseTimeNanoseconds"] = time.time_ns() // _BASE_NS * _BASE_NS
        named = {event.get("pid") for event in found["traceEvents"] if event.get("name") == "process_name"}
        if self.lost:
            found["stepfs_events_lost"] = self.lost
        base_ns = int(found.get("baseTimeNanoseconds", 0))
        found["traceEvents"] = [*found["traceEvents"], *self._chrome(base_ns, named)]
        return found

    def _chrome(self, base_ns: int, named: Container[object]) -> Iterator[dict[str, Any]]:
        """`named`: processes that have a name already, the trainer's own."""
        by_pid: defaultdict[int, defaultdict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for pid, _, event in self._kept:
            by_pid[pid][event.track].append(event)
        for pid, name in self.names.items():
            row = _ROW_MIN
            if pid not in named:
                lost = f", {self.lost} events lost" if self.lost else ""
                yield _said("process_name", pid, 0, name=name)
                yield _said("process_labels", pid, 0, labels=f"stepfs{lost}")
            for track, events in sorted(by_pid[pid].items()):
                for place, placed in enumerate(_rows(events)):
                    row += 1
                    yield _said("thread_name", pid, row, name=f"{track} ({place + 1})" if place else track)
                    yield _said("thread_sort_index", pid, row, sort_index=row)
                    yield from (_chrome_event(event, pid, row, base_ns) for event in placed)


def _said(what: str, pid: int, row: int, **facts: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "ts": 0, "pid": pid, "tid": row, "args": facts}


def _chrome_event(event: Event, pid: int, row: int, base_ns: int) -> dict[str, Any]:
    at = {"pid": pid, "tid": row, "ts": (event.ns - base_ns) / _NS_PER_US}
    long = {"ph": "X", "dur": event.ns_long / _NS_PER_US} if event.ns_long else {"ph": "i", "s": "t"}
    return {"cat": "stepfs", "name": event.name, **at, **long, "args": dict(event.facts)}


def _rows(events: Iterable[Event]) -> list[list[Event]]:
    """Rows on which no two events overlap."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.ns):
        row = next((row for row in rows if row[-1].ns + row[-1].ns_long <= event.ns), None)
        if row is None:
            rows.append([event])
        else:
            row.append(event)
    return rows


def parse(text: str) -> tuple[int, list[Event]]:
    """(process, events) of what a daemon gave."""
    first, *rest = text.splitlines()
    return int(json.loads(first)["pid"]), [Event(*json.loads(line)) for line in rest]


def read_profile(path: Path) -> dict[str, Any]:
    """A trace of torch.profiler, compressed or not. `AbsentError`, `UsageError` for another file."""
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except FileNotFoundError:
        raise AbsentError(f"{path} does not exist; name a file of `torch.profiler`'s export_chrome_trace") from None
    except (OSError, EOFError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a trace ({error}); name one of torch.profiler's") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise UsageError(f"{path} has no traceEvents; name a file of `torch.profiler`'s export_chrome_trace")
    return found


def check_out(out: Path) -> None:
    """Before anything is traced. `AbsentError`, `RefusedError`."""
    if not out.parent.is_dir():
        raise AbsentError(f"{out.parent} does not exist; name a file in a directory that does")
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise RefusedError(f"{out} cannot be written; name a file in a directory of your own")


def finish(out: Path, recording: Recording, merge: Path | None) -> None:
    """Write the trace, merged with a profile if that can be read; else alone, and its error is raised. Errors as `write`."""
    try:
        profile = None if merge is None else read_profile(merge)
    except StepfsError:
        write(out, recording.document())
        raise
    write(out, recording.document(profile))


def write(out: Path, document: Mapping[str, Any]) -> None:
    """Whole or not at all; compressed if the name ends in .gz. `StepfsError` where the disk is full."""
    data = json.dumps(document, separators=(",", ":")).encode()
    part = ""
    try:
        with tempfile.NamedTemporaryFile("wb", dir=out.parent, prefix=f".{out.name}-", delete=False) as file:
            part = file.name
            file.write(gzip.compress(data, 6) if out.suffix == ".gz" else data)
        Path(part).chmod(0o644)
        Path(part).replace(out)
    except OSError as error:
        with suppress(OSError):
            Path(part).unlink()
        raise StepfsError(
            f"{out} cannot be written: {error.strerror}; nothing is under that name: free space, or name another"
        ) from None
