"""Which checkpoints a group keeps: pure decisions about the order of recording, free of I/O and clocks.

"The K newest" means the K recorded last. After a roll-back these are not the K greatest: a trainer that kept 90 and
100, went back to 40 and then saves 50 must lose neither 50 nor 40. So a record holds the order of recording, and
`keep` counts only among checkpoints at or below the recorded one. The greater ones belong to the abandoned branch:
they keep no step that a lower checkpoint does not keep anyway, and they leave once the trainer has passed them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepfs.format.ids import Step

Order = tuple[Step, ...]  # kept checkpoints in the order of recording


def add(order: Order, step: Step, keep: int | None) -> Order:
    """The order after `step` was recorded. With `keep`, the `keep` newest at or below it stay, `step` among them."""
    assert keep is None or keep >= 1
    grown = (*_without(order, {step}), step)
    if keep is None:
        return grown
    passed = [kept for kept in grown if kept <= step]
    return _without(grown, passed[:-keep])


def resume(order: Order, step: Step) -> Order:
    """The order after training resumed from `step`: nothing is dropped; greater checkpoints count as older than the
    rest."""
    left = tuple(kept for kept in order if kept > step)
    return (*left, *_without(order, {*left, step}), step)


def set_to(order: Order, kept: Iterable[Step]) -> Order:
    """Exactly `kept`: known checkpoints in their present order, then the new ones in ascending order."""
    wanted = set(kept)
    return (*(step for step in order if step in wanted), *sorted(wanted - set(order)))


def _without(order: Sequence[Step], gone: Iterable[Step]) -> Order:
    leaves = set(gone)
    return tuple(step for step in order if step not in leaves)
