"""A mount's record for the fleet view: informative only, no decision depends on it.

It is the only kind of object that is overwritten, and only by the mount that it names. Times are of that mount's
clock.
"""

from dataclasses import dataclass
from typing import Final

from stepfs.format.codec import Fields, Kind, Layout, Stored, decode, encode, stored
from stepfs.format.ids import Step

_TEXT_BYTES_MAX: Final = 4096
PERMILLE: Final = 1000
_CAUSES: Final = "causes"
_CAUSES_MAX: Final = 32


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
    causes: tuple[
        tuple[str, int], ...
    ] = ()  # thousandths of that time in which one waited, by cause, the greatest first

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
    record.
    """
    return f"{host}:{directory}".encode(errors="backslashreplace").decode()


def encode_node(lake_id: str, record: NodeRecord) -> bytes:
    causes = {_CAUSES: dict(record.causes)} if record.causes else {}
    return encode(Kind.NODE, {"lake": lake_id, **_LAYOUT.body(record), **causes})


def decode_node(data: bytes, what: str) -> tuple[str, NodeRecord]:
    """→ (lake id, record)."""
    fields = decode(Kind.NODE, data, what)
    return fields.text("lake"), _LAYOUT.read(fields, causes=_causes_of(fields))


def _causes_of(fields: Fields) -> tuple[tuple[str, int], ...]:
    """None in a record of an earlier version."""
    if _CAUSES not in fields:
        return ()
    causes = fields.map(_CAUSES)
    names = [name for name, _ in causes.others(frozenset())[:_CAUSES_MAX] if isinstance(name, str)]
    return tuple(sorted(((name, causes.integer(name, high=PERMILLE)) for name in names), key=lambda item: -item[1]))


def _any_text(name: str) -> Stored:
    return stored(name, Fields.text, bytes_max=_TEXT_BYTES_MAX)._replace(write=_text)


def _text(text: str) -> str:
    """Any host or path as UTF-8 of a bounded size; a longer text loses its beginning."""
    printable = text.encode(errors="backslashreplace")
    return printable[-_TEXT_BYTES_MAX:].decode(errors="ignore")


_LAYOUT: Final = Layout(
    NodeRecord,
    group=stored("group", Fields.text),
    host=_any_text("host"),
    directory=_any_text("directory"),
    pid=stored("pid", Fields.integer),
    version=_any_text("stepfs"),
    next_step=stored("next_step", Fields.integer),
    read_to=stored("read_to", Fields.integer),
    waited_permille=stored("waited", Fields.integer, high=PERMILLE),
    time_ms=stored("time", Fields.integer),
)
