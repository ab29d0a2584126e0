"""A mount's record for the fleet view: informative only, no decision depends on it.

It is the only kind of object that is overwritten, and only by the mount that it names. Times are of that mount's
clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepfs.format.codec import Kind, decode, encode
from stepfs.format.ids import Step

_TEXT_BYTES_MAX: Final = 4096
PERMILLE: Final = 1000
USUAL_INTERVAL_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One mount of one group, as of `time_ms`."""

    group: str
    host: str
    directory: str
    pid: int
    version: str  # of stepfs
    next_step: Step  # the number of committed steps that it knows: its frontier + 1
    read_to: Step  # one past the step opened last; 0 before the first
    waited_permille: int  # of the time since the former record in which a reader was blocked
    time_ms: int
    interval_ms: int = USUAL_INTERVAL_MS  # until the next record, as planned

    @property
    def frontier(self) -> Step:
        """The newest committed step it knows; -1 before the first."""
        return Step(self.next_step - 1)

    @property
    def last_step(self) -> Step | None:
        """The step opened last; None before the first."""
        return Step(self.read_to - 1) if self.read_to else None


def node_name(host: str, directory: str) -> str:
    """The name of a mount; equal for the next mount at the same place, so that it takes over a killed mount's
    record."""
    return f"{host}:{directory}".encode(errors="backslashreplace").decode()


def encode_node(lake_id: str, record: NodeRecord) -> bytes:
    return encode(
        Kind.NODE,
        {
            "lake": lake_id,
            "group": record.group,
            "host": _text(record.host),
            "directory": _text(record.directory),
            "pid": record.pid,
            "stepfs": _text(record.version),
            "next_step": record.next_step,
            "read_to": record.read_to,
            "waited": record.waited_permille,
            "time": record.time_ms,
            "interval": record.interval_ms,
        },
    )


def decode_node(data: bytes, what: str) -> tuple[str, NodeRecord]:
    """→ (lake id, record)."""
    fields = decode(Kind.NODE, data, what)
    return fields.text("lake"), NodeRecord(
        group=fields.text("group"),
        host=fields.text("host", bytes_max=_TEXT_BYTES_MAX),
        directory=fields.text("directory", bytes_max=_TEXT_BYTES_MAX),
        pid=fields.integer("pid"),
        version=fields.text("stepfs", bytes_max=_TEXT_BYTES_MAX),
        next_step=Step(fields.integer("next_step")),
        read_to=Step(fields.integer("read_to")),
        waited_permille=fields.integer("waited", high=PERMILLE),
        time_ms=fields.integer("time"),
        interval_ms=fields.integer("interval"),
    )


def _text(text: str) -> str:
    """Any host or path as UTF-8 of a bounded size; a longer text loses its beginning."""
    printable = text.encode(errors="backslashreplace")
    return printable[-_TEXT_BYTES_MAX:].decode(errors="ignore")
