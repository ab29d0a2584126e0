"""The changes of the group's record that one look at a checkpoint directory makes: pure.

Every look may be old: a file system shows a change late, and a slow store records it later still. Meanwhile a trainer that
went back may have written the same checkpoint again; nodes that saw it before and after that find no change, and add
nothing. So a change that drops something keeps all that its look shows. At that moment training could resume from
these checkpoints, so all later ones lie at or above the least of them: however old the look is, the group's need does
not pass the checkpoints from which training can resume. This may record again a checkpoint that has vanished since; the
node that saw it drops it at its next look.

A change that drops nothing adds only the checkpoints that are new to its node. So a late node does not bring back those
that the others have just dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfs.format.ids import Step

_NOTHING: frozenset[Step] = frozenset()


@dataclass(frozen=True, slots=True)
class Difference:
    """From the last look, which showed `seen` (None: there was none), to this one."""

    seen: frozenset[Step] | None
    there: frozenset[Step]  # checkpoints that exist, or count as existing
    adds: frozenset[Step]  # of these, the ones that may be recorded
    barred: frozenset[Step] = _NOTHING  # entries that may be checkpoints: kept if they are
    drops_wait: bool = False  # this look may be older than a reclaim
    # The record may lack a checkpoint that exists, without a change since the last look.
    reconciles: bool = False

    @property
    def is_empty(self) -> bool:
        return self.there == self.seen and not self.reconciles

    @property
    def is_new(self) -> bool:
        """Whether the look shows a checkpoint that the one before did not show."""
        return self.seen is None or not self.adds <= self.seen

    def apply(self, kept: frozenset[Step]) -> frozenset[Step]:
        """The checkpoints to keep, from those that are `kept`."""
        adds = self.adds | (self.barred & kept)
        if self.seen is None:
            # A first, empty look proves nothing: the run may not have written its first checkpoint yet.
            return kept | adds if self.drops_wait else adds or kept
        gone = self.seen - self.there - (self.barred & kept)
        if not (self.reconciles or gone & kept):
            adds -= self.seen
        return (kept | adds) - gone

    def seen_next(self, kept: frozenset[Step]) -> frozenset[Step]:
        """The base of the next comparison, after this change of the `kept` ones."""
        shown = self.there | (self.barred & kept)
        return shown | kept if self.seen is None and self.drops_wait and shown else shown
