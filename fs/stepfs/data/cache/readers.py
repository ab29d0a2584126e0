"""How many times each slice is opened: by ranks that are hard links to it, or by a reader that opens its files twice.

A slice that was closed once is not consumed while another reader is expected. The usual number is learned from the
share of opens that are not the first of their slice. Rejected: the link count. It counts the ranks of the whole job,
of which some read on other nodes, and not the ranks that open one name together.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final

from stepfs.format.ids import SliceKey

_SLICES_MAX: Final = 4096  # remembered
_OPENS: Final = 64  # the latest, from which is learned
_REOPENED_MIN: Final = 0.2  # of the latest opens: fewer are a look now and then, not a second reader


@dataclass(slots=True)
class _Uses:
    opens: int = 0
    closes: int = 0


class ReaderCounts:
    """Opens and closes of the slices of one mount. Plain state, no I/O."""

    def __init__(self) -> None:
        self.expected = 1  # opens of a slice
        self._uses: OrderedDict[SliceKey, _Uses] = OrderedDict()
        self._latest: deque[int] = deque(maxlen=_OPENS)  # 1 for the first open of a slice, 2 for its second …

    def note_open(self, key: SliceKey) -> bool:
        """A slice was opened; True if more opens of each slice are expected, or fewer, than before."""
        uses = self._uses.setdefault(key, _Uses())
        self._uses.move_to_end(key)
        if len(self._uses) > _SLICES_MAX:
            self._uses.popitem(last=False)
        uses.opens += 1
        self._latest.append(uses.opens)
        reopened = sum(opens > 1 for opens in self._latest) / len(self._latest)
        before, self.expected = self.expected, 1
        if reopened >= _REOPENED_MIN:
            first = 1 - reopened
            self.expected = min(max(self._latest), max(2, round(1 / first)) if first else max(self._latest))
        return self.expected != before

    def note_close(self, key: SliceKey) -> None:
        if key in self._uses:
            self._uses[key].closes += 1

    def is_awaited(self, key: SliceKey) -> bool:
        """Whether a slice that was closed will be opened again, as far as is known."""
        uses = self._uses.get(key)
        return uses is not None and uses.closes < self.expected
