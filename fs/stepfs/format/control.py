"""A slot of `control/`: the needs of the lake and its floor, in one record.

The record holds the floor *and* every live consumer group, so one create-if-absent of the next number decides between
a group that needs earlier steps and a reclaimer that gives them up (lake/control.py). A retired group is absent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.codec import Fields, Kind, Later, Layout, Stored, Value, decode, encode, readable, signed, stored
from stepfs.format.commit import URL_BYTES_MAX
from stepfs.format.identity import PACE_GROUP
from stepfs.format.ids import FIRST_STEP, FIRST_VERSION, ID_BYTES_MAX, Step, Version

RECORD_ID_BYTES: Final = 16
RECORD_BYTES_MAX: Final = 1 << 20
RESERVED_BYTES: Final = 16 << 10  # for what follows from a change that frees something: minima, floor, totals
KEPT_CHECKPOINTS_MAX: Final = 4096  # of one group
MINIMA_MAX: Final = 256
_OF_GROUP: Final = frozenset(("name", "start", "kept", "recorded", "fork", "replica"))


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The durable checkpoints that one live consumer group keeps."""

    start: Step  # the need while nothing is kept: the first live step at registration
    kept: tuple[Step, ...] = ()  # `next` of every kept, durable checkpoint, ascending, distinct
    recorded: tuple[Step, ...] = ()  # `kept` in the order of recording; empty when that is ascending
    fork: str = ""  # URL of the fork that holds the group in its parent, which alone releases it
    replica: str = ""  # URL of the replica that the group is of: of its runs, or of data alone if `fork` is set, too
    later: Later = ()

    @property
    def need(self) -> Step:
        """The first step that this group may still read."""
        return min(self.kept, default=self.start)

    @property
    def order(self) -> tuple[Step, ...]:
        """The kept checkpoints in the order of recording, the newest last."""
        return self.recorded or self.kept


@dataclass(frozen=True, slots=True)
class ControlRecord:
    """The needs of all groups and the floor, as of one change."""

    record_id: bytes = b""  # random: distinguishes my create from another writer's
    time_ms: int = 0
    first_live_step: Step = FIRST_STEP
    floor: Version = FIRST_VERSION  # lowest log version that may still exist
    deleted_bytes: int = 0  # payload bytes reclaimed so far
    groups: Mapping[str, GroupRecord] = field(default_factory=dict)
    # (number of the record that ended it, need), both rising: see `lake/decisions.py`
    minima: tuple[tuple[int, Step], ...] = ()
    pauses_asked: int = 0  # how often a writer asked the others to leave the log alone (`stepfs.lake.log.append`)
    needs_of_writers: tuple[str, ...] = ()  # what a later version made; all that write here must know it
    later: Later = ()

    @property
    def holding(self) -> dict[str, GroupRecord]:
        """The groups that hold steps; a pace holds none."""
        return {name: group for name, group in self.groups.items() if not name.startswith(PACE_GROUP)}

    @property
    def paces(self) -> dict[str, GroupRecord]:
        """Where runs are that said so, by the names of the runs."""
        return {name[len(PACE_GROUP) :]: one for name, one in self.groups.items() if name.startswith(PACE_GROUP)}

    @property
    def need(self) -> Step:
        """The first step that any group may still read; without a group every live step may be needed."""
        return min((group.need for group in self.holding.values()), default=self.first_live_step)


NOTHING_YET: Final = ControlRecord()  # before record 0


def encode_control(lake_id: str, record: ControlRecord, *, frees: bool = True) -> bytes:
    """`RefusedError` if the record is larger than `RECORD_BYTES_MAX`, or if readers would not accept it.

    Unless the change `frees` something, a part is left free for one that does.
    """
    body = signed({"lake": lake_id, **_LAYOUT.body(record)})
    if record.needs_of_writers:
        body["needs_of_writers"] = list(record.needs_of_writers)
    data = encode(Kind.CONTROL, body)
    if len(data) > RECORD_BYTES_MAX - (0 if frees else RESERVED_BYTES):
        raise RefusedError(
            f"the lake's {len(record.groups)} groups keep too many checkpoints for one record ({len(data)} bytes, at most "
            f"{RECORD_BYTES_MAX}); keep fewer (`stepfs checkpoint … --keep K`) or retire groups (`stepfs retire-group`)"
        )
    return readable(Kind.CONTROL, data, (lake_id, record), decode_control)


def decode_control(data: bytes, what: str) -> tuple[str, ControlRecord]:
    """→ (lake id, record)."""
    fields = decode(Kind.CONTROL, data, what)
    needs = fields.texts("needs_of_writers") if "needs_of_writers" in fields else ()
    record = _LAYOUT.read(fields, needs_of_writers=tuple(needs))
    for name, group in record.holding.items():
        if group.need < record.first_live_step:
            raise CorruptError(f"{what}: group {name!r} needs step {group.need}, below {record.first_live_step}")
    return fields.text("lake"), record


def _read_minima(fields: Fields, name: str) -> tuple[tuple[int, Step], ...]:
    flat = fields.integers(name, items_max=2 * MINIMA_MAX)
    minima = tuple((number, Step(need)) for number, need in zip(flat[::2], flat[1::2], strict=False))
    if len(flat) % 2 or any(a >= c or b >= d for (a, b), (c, d) in pairwise(minima)):
        raise CorruptError(f"{fields.what}: the minima of the need do not rise")
    return minima


def _read_groups(fields: Fields, name: str) -> dict[str, GroupRecord]:
    groups = {item.text("name", bytes_max=ID_BYTES_MAX): _read_group(item, fields.what) for item in fields.maps(name)}
    strange = [group for group in groups if not group or not group.isprintable()]
    if strange:  # it would be shown, and be part of a command to copy
        raise CorruptError(f"{fields.what}: {strange[0]!r} is not the name of a group")
    return groups


def _group_body(name: str, group: GroupRecord) -> dict[Value, object]:
    assert len(name.encode()) <= ID_BYTES_MAX
    body: dict[Value, object] = {"name": name, "start": group.start, "kept": list(group.kept)}
    if group.recorded:
        body["recorded"] = list(group.recorded)
    if group.fork:
        body["fork"] = group.fork
    if group.replica:
        body["replica"] = group.replica
    return body | dict(group.later)


def _read_group(fields: Fields, what: str) -> GroupRecord:
    kept = fields.integers("kept", items_max=KEPT_CHECKPOINTS_MAX)
    if kept != sorted(set(kept)):
        raise CorruptError(f"{what}: kept checkpoints are not ascending and distinct")
    recorded = fields.integers("recorded", items_max=KEPT_CHECKPOINTS_MAX) if "recorded" in fields else []
    if recorded and (recorded == kept or sorted(recorded) != kept):
        raise CorruptError(f"{what}: the order of recording names other checkpoints than are kept")
    return GroupRecord(
        start=Step(fields.integer("start")),
        kept=tuple(map(Step, kept)),
        recorded=tuple(map(Step, recorded)),
        fork=fields.text("fork", bytes_max=URL_BYTES_MAX) if "fork" in fields else "",
        replica=fields.text("replica", bytes_max=URL_BYTES_MAX) if "replica" in fields else "",
        later=fields.others(_OF_GROUP),
    )


_LAYOUT: Final = Layout(
    ControlRecord,
    ("lake", "writer", "needs_of_writers"),
    record_id=stored("id", Fields.binary, size=RECORD_ID_BYTES),
    time_ms=stored("time", Fields.integer),
    first_live_step=stored("first_live_step", Fields.integer),
    floor=stored("floor", Fields.integer),
    deleted_bytes=stored("deleted_bytes", Fields.total),
    groups=Stored("groups", _read_groups, lambda groups: [_group_body(*named) for named in sorted(groups.items())]),
    minima=Stored("minima", _read_minima, lambda minima: [number for pair in minima for number in pair]),
    pauses_asked=stored("pauses", Fields.integer),
)
