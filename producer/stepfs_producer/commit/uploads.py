"""Appends that are not committed yet: checked and frozen, in order, within budgets; nothing here waits.

Appends and tickets get dense seqs; uploads finish in any order; commits take the longest durable prefix. COMMIT.md has
the rules of tickets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgpack

from stepfs.errors import CorruptError, PayloadTypeError, UsageError
from stepfs.format.codec import unpack
from stepfs.format.grid import Grid
from stepfs.format.identity import HEAD_BYTES, payload_problem
from stepfs.format.ids import DESCRIPTOR_BYTES_MAX, NOTE_BYTES_MAX, POSITION_BYTES_MAX, RECORDS_MAX, SliceIndex
from stepfs.format.tgb import ALIGNMENT_BYTES, Descriptor, SliceRef, TgbImage, check_packed, descriptor_bytes
from stepfs_producer.commit.rebase import Durable

Payload = bytes | bytearray | memoryview  # or any other one-dimensional buffer of bytes

_BYTE_FORMATS: Final = {"B", "b", "c"}

UNCOMMITTED_FACTOR: Final = 8
UNCOMMITTED_TGBS_MAX: Final = 4096


def freeze(batch: Sequence[Payload], *, grid: Grid, bytes_max: int) -> tuple[bytes, ...]:
    """One batch as immutable payloads, one per slice; `UsageError` names the rule that it breaks."""
    if isinstance(batch, (bytes, bytearray, memoryview, str)) or not isinstance(batch, Sequence):
        raise UsageError(f"a batch is a sequence of {grid.slices} payloads, not a {type(batch).__name__}")
    if len(batch) != grid.slices:
        raise UsageError(f"a batch of {len(batch)} payloads for a lake of {grid}; pass one per slice")
    views = [_view(payload, number) for number, payload in enumerate(batch)]
    size = sum(view.nbytes for view in views)
    if size > bytes_max:
        raise UsageError(
            f"a batch of {size} bytes exceeds max_pending_bytes={bytes_max}; make smaller batches or raise the limit "
            "(a plan: smaller steps, or more --memory)"
        )
    checksums = descriptor_bytes([view.nbytes for view in views])
    if checksums > DESCRIPTOR_BYTES_MAX:
        raise UsageError(
            f"a batch of {size} bytes in {grid.slices} slices needs {checksums} bytes of checksums in the log, at most "
            f"{DESCRIPTOR_BYTES_MAX} fit; make smaller batches"
        )
    return tuple(
        payload if isinstance(payload, bytes) else view.tobytes() for payload, view in zip(batch, views, strict=True)
    )


def _view(payload: Payload, number: int) -> memoryview:
    try:
        view = memoryview(payload)
    except TypeError:
        view = None
    # The buffer of an array is not a file: it has no header with its shape, and readers refuse it.
    if view is None or view.ndim != 1 or view.format.lstrip("@=<>!") not in _BYTE_FORMATS:
        what = "" if view is None else f" of format {view.format!r} and {view.ndim} dimensions"
        raise PayloadTypeError(
            f"payload {number} is a {type(payload).__name__}{what}, not bytes; pass the bytes of a file, as "
            "file.getvalue() after numpy.save(file, array), or stepfs.torch.dump(obj)"
        )
    return view


def check_kind(payloads: Sequence[bytes], *, ext: str) -> None:
    """`UsageError` names the first payload that cannot be a file of `ext`."""
    for number, payload in enumerate(payloads):
        problem = payload_problem(ext, payload[:HEAD_BYTES], len(payload))
        if problem is not None:
            raise UsageError(
                f"payload {number} {problem}; append what the lake promises (it was made with --check-payload)"
            )


def check_records(records: Sequence[int] | None, *, slices: int) -> tuple[int, ...]:
    """The number of records per slice; a payload counts as one unless the caller gives a number."""
    if records is None:
        return (1,) * slices
    counts = tuple(records)
    if len(counts) != slices:
        raise UsageError(f"{len(counts)} record counts for {slices} slices; pass one per slice")
    if any(not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 2**32 for count in counts):
        raise UsageError("record counts are integers from 0 to 4294967295")
    if sum(counts) > RECORDS_MAX:
        raise UsageError(f"{sum(counts)} records in one batch; at most {RECORDS_MAX} can be counted")
    return counts


def pack_position(position: object) -> bytes:
    """A position as stored: msgpack of at most 64 KiB that reads back."""
    return _packed("position", position, POSITION_BYTES_MAX)


def pack_note(note: object) -> bytes:
    """A step's note as stored: msgpack of at most 256 bytes that reads back; b"" for None."""
    return b"" if note is None else _packed("note", note, NOTE_BYTES_MAX)


def _packed(name: str, value: object, bytes_max: int) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
        if len(packed) <= bytes_max:
            unpack(packed, name)
    except (TypeError, ValueError, OverflowError, CorruptError) as error:
        raise UsageError(
            f"{name} does not fit msgpack ({error}); use numbers, text, bytes, lists and dicts of them"
        ) from error
    if len(packed) > bytes_max:
        raise UsageError(
            f"{name} takes {len(packed)} bytes as msgpack, at most {bytes_max} fit; store the rest elsewhere"
        )
    return packed


def unpack_position(packed: bytes) -> object:
    """Inverse of `pack_position`; None before the first commit."""
    return unpack(packed, "position") if packed else None


def descriptor_of(image: TgbImage, key: str, seq: int) -> Descriptor:
    """A TGB that is in the store under `key`, as a commit names it."""
    return Descriptor(
        origin=0,
        key=key,
        size=image.size,
        seq=seq,
        packed_slices=image.packed_slices,
        packed_blocks=image.packed_blocks,
    )


@dataclass(slots=True)
class Item:
    """One append that is not in the log yet."""

    seq: int
    payloads: tuple[bytes, ...]  # emptied once the TGB is durable; () of a ticket
    records: tuple[int, ...]
    position: bytes
    payload_bytes: int  # of a ticket: about so many, until it is settled
    note: bytes = b""
    durable: Durable | None = None
    durable_s: float = 0.0
    keys: set[str] = field(default_factory=set)  # of a ticket: names that its object may have


@dataclass(frozen=True, slots=True)
class Ticket:
    """One append: its seq, and the key of its object."""

    seq: int
    key: str


class CommitWindow:
    """Items from `first_seq` (the oldest uncommitted) to `next_seq`, in order."""

    def __init__(self, next_seq: int, *, memory_bytes_max: int) -> None:
        self.memory_bytes_max = memory_bytes_max
        self.memory_bytes = 0
        self.uncommitted_bytes = 0
        self.next_seq = next_seq
        self._items: list[Item] = []
        self._unsettled: dict[int, Item] = {}  # of tickets, in order
        self._ready = 0
        self._ready_bytes = 0

    @property
    def first_seq(self) -> int:
        return self.next_seq - len(self._items)

    @property
    def certain_seq(self) -> int:
        """All below it will be committed without any help: the oldest ticket that is not settled, or the next append."""
        return next(iter(self._unsettled), self.next_seq)

    @property
    def uncommitted_tgbs(self) -> int:
        return len(self._items)

    @property
    def ready_tgbs(self) -> int:
        """The number of TGBs that could be committed now."""
        return self._ready

    @property
    def oldest_s(self) -> float:
        """The time at which the oldest of them became durable; meaningless if there is none."""
        return self._items[0].durable_s

    def admits(self, payload_bytes: int, *, in_memory: bool = True) -> bool:
        """Whether an append of this size fits now. A lone append always fits: otherwise it could never be made.

        `in_memory`: its payloads are here, and are not uploaded elsewhere.
        """
        if not self._items:
            return True
        free = not in_memory or not self.memory_bytes
        memory = free or self.memory_bytes + payload_bytes <= self.memory_bytes_max
        uncommitted = self.uncommitted_bytes + payload_bytes <= UNCOMMITTED_FACTOR * self.memory_bytes_max
        return memory and uncommitted and len(self._items) < UNCOMMITTED_TGBS_MAX

    @property
    def crowded(self) -> bool:
        """Whether half of the allowed uncommitted appends exist: then commit without waiting for the pacer."""
        return (
            2 * self._ready_bytes >= UNCOMMITTED_FACTOR * self.memory_bytes_max
            or 2 * self._ready >= UNCOMMITTED_TGBS_MAX
        )

    def add(self, payloads: tuple[bytes, ...], records: tuple[int, ...], position: bytes, note: bytes = b"") -> Item:
        payload_bytes = sum(map(len, payloads))
        self.memory_bytes += payload_bytes
        return self._added(Item(self.next_seq, payloads, records, position, payload_bytes, note))

    def reserve(self, payload_bytes: int, records: tuple[int, ...], position: bytes, note: bytes = b"") -> Item:
        """Give an append its seq whose payloads are uploaded elsewhere."""
        item = self._added(Item(self.next_seq, (), records, position, payload_bytes, note))
        self._unsettled[item.seq] = item
        return item

    def reserved(self, ticket: Ticket) -> Item:
        """The append of a ticket that is not settled; else `UsageError`."""
        item = self._unsettled.get(ticket.seq)
        if item is None or ticket.key not in item.keys:
            raise UsageError(
                f"ticket {ticket.seq} with key {ticket.key} is not open: it was settled, or is of another incarnation; reserve "
                "an append for each step"
            )
        return item

    def _added(self, item: Item) -> Item:
        self._items.append(item)
        self.next_seq += 1
        self.uncommitted_bytes += item.payload_bytes
        return item

    def made_durable(self, item: Item, tgb: Descriptor, now_s: float) -> None:
        """Note that the TGB is in the store: its payloads may leave memory."""
        assert item.durable is None
        assert tgb.seq == item.seq
        if item.seq in self._unsettled:
            del self._unsettled[item.seq]
            self.uncommitted_bytes += tgb.payload_bytes - item.payload_bytes
            item.payload_bytes = tgb.payload_bytes
        else:
            self.memory_bytes -= item.payload_bytes
        item.durable = Durable(replace(tgb, note=item.note), item.position, item.payload_bytes, sum(item.records))
        item.durable_s = now_s
        item.payloads = ()
        while self._ready < len(self._items) and self._items[self._ready].durable is not None:
            self._ready_bytes += self._items[self._ready].payload_bytes
            self._ready += 1

    def ready(self) -> list[Durable]:
        """The longest durable prefix."""
        return [item.durable for item in self._items[: self._ready] if item.durable is not None]

    def durable_before(self, time_s: float) -> list[Descriptor]:
        """Those of them that were durable before this time."""
        return [item.durable.tgb for item in self._items[: self._ready] if item.durable and item.durable_s < time_s]

    def committed_below(self, next_seq: int) -> int:
        """Drop the appends below `next_seq`, which the log holds: by seq and not by count. Returns their number."""
        gone = next_seq - self.first_seq
        assert gone <= self._ready, "the log holds what was never durable"
        if gone <= 0:
            return 0
        freed = sum(item.payload_bytes for item in self._items[:gone])
        self._ready -= gone
        self._ready_bytes -= freed
        self.uncommitted_bytes -= freed
        del self._items[:gone]
        return gone


def refuse_misfit(item: Item, tgb: Descriptor) -> None:
    """`UsageError` names the first mismatch of a descriptor with the append that it would settle."""
    why = next(_misfits(item, tgb), None)
    if why is not None:
        raise UsageError(
            f"the descriptor does not fit ticket {item.seq}: {why}; settle a ticket with what was uploaded under it"
        )


def _misfits(item: Item, tgb: Descriptor) -> Iterator[str]:
    """Reasons why the descriptor is not of the item, in order of severity: later ones may follow from the first."""
    if tgb.key not in item.keys or tgb.origin:
        yield f"it names {tgb.key}, which is no key of it"
    if tgb.seq != item.seq:
        yield f"it is of seq {tgb.seq}"
    try:
        check_packed(tgb.packed_slices, tgb.packed_blocks, size=tgb.size, what=tgb.key)
    except CorruptError as error:
        yield str(error)
    if tgb.slices != len(item.records):
        yield f"it has {tgb.slices} slices, not {len(item.records)}"
    slices = [tgb.slice(SliceIndex(index)) for index in range(tgb.slices)]
    if tuple(one.records for one in slices) != item.records:
        yield "its slices have other numbers of records"
    if not _packed_tightly(slices, tgb.size):
        yield f"its slices do not fill an object of {tgb.size} bytes"
    checksums = len(tgb.packed_slices) + len(tgb.packed_blocks)
    if checksums > DESCRIPTOR_BYTES_MAX:
        yield f"it has {checksums} bytes of checksums, at most {DESCRIPTOR_BYTES_MAX} fit into the log"


def _packed_tightly(slices: list[SliceRef], size: int) -> bool:
    end = ALIGNMENT_BYTES  # the header
    for one in slices:
        if one.offset != end:
            return False
        end += one.length + -one.length % ALIGNMENT_BYTES
    return end < size  # index and footer follow
