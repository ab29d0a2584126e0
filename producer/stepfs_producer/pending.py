"""The window of appends that are not committed yet: their order and budgets; nothing here waits.

Appends get dense seqs; uploads finish in any order; commits take the longest durable prefix. There are two bounds,
because two resources run out. Payload bytes that are not in the store yet occupy memory: `memory_bytes_max`. Uploaded
TGBs without a commit accumulate while the log cannot be reached: `UNCOMMITTED_FACTOR` times that, and
`UNCOMMITTED_TGBS_MAX`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepfs.format.descriptor import Descriptor
from stepfs_producer.rebase import Durable

UNCOMMITTED_FACTOR: Final = 8
UNCOMMITTED_TGBS_MAX: Final = 4096


@dataclass(slots=True)
class Item:
    """One append that is not in the log yet."""

    seq: int
    payloads: tuple[bytes, ...]  # emptied once the TGB is durable
    records: tuple[int, ...]
    position: bytes
    payload_bytes: int
    durable: Durable | None = None
    durable_s: float = 0.0


class Pending:
    """Items from `first_seq` (the oldest uncommitted) to `next_seq`, in order."""

    def __init__(self, next_seq: int, *, memory_bytes_max: int) -> None:
        self.memory_bytes_max = memory_bytes_max
        self.memory_bytes = 0
        self.uncommitted_bytes = 0
        self.next_seq = next_seq
        self._items: list[Item] = []
        self._ready = 0
        self._ready_bytes = 0

    @property
    def first_seq(self) -> int:
        return self.next_seq - len(self._items)

    @property
    def uncommitted_tgbs(self) -> int:
        """The number of appends without a commit."""
        return len(self._items)

    @property
    def ready_tgbs(self) -> int:
        """The number of TGBs that could be committed now."""
        return self._ready

    @property
    def oldest_s(self) -> float:
        """The time at which the oldest of them became durable; meaningless if there is none."""
        return self._items[0].durable_s

    def admits(self, payload_bytes: int) -> bool:
        """Whether an append of this size fits now. A lone append always fits: otherwise it could never be made."""
        if not self._items:
            return True
        memory = not self.memory_bytes or self.memory_bytes + payload_bytes <= self.memory_bytes_max
        uncommitted = self.uncommitted_bytes + payload_bytes <= UNCOMMITTED_FACTOR * self.memory_bytes_max
        return memory and uncommitted and len(self._items) < UNCOMMITTED_TGBS_MAX

    @property
    def crowded(self) -> bool:
        """Whether half of the allowed uncommitted appends exist: then commit without waiting for the pacer."""
        return (
            2 * self._ready_bytes >= UNCOMMITTED_FACTOR * self.memory_bytes_max
            or 2 * self._ready >= UNCOMMITTED_TGBS_MAX
        )

    def add(self, payloads: tuple[bytes, ...], records: tuple[int, ...], position: bytes) -> Item:
        """Give an append its seq."""
        payload_bytes = sum(map(len, payloads))
        item = Item(self.next_seq, payloads, records, position, payload_bytes)
        self._items.append(item)
        self.next_seq += 1
        self.memory_bytes += payload_bytes
        self.uncommitted_bytes += payload_bytes
        return item

    def made_durable(self, item: Item, tgb: Descriptor, now_s: float) -> None:
        """Note that the TGB is in the store: its payloads may leave memory."""
        assert item.durable is None
        assert tgb.seq == item.seq
        item.durable = Durable(tgb, item.position, item.payload_bytes, sum(item.records))
        item.durable_s = now_s
        item.payloads = ()
        self.memory_bytes -= item.payload_bytes
        while self._ready < len(self._items) and self._items[self._ready].durable is not None:
            self._ready_bytes += self._items[self._ready].payload_bytes
            self._ready += 1

    def ready(self) -> list[Durable]:
        """The longest durable prefix."""
        return [item.durable for item in self._items[: self._ready] if item.durable is not None]

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
