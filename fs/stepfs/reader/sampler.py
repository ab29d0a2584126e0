"""The sampler that a reader knows: `stepfs.shuffled_steps.ShuffledSteps` is one."""

from __future__ import annotations

from typing import Protocol

from stepfs.data.prefetch.order_hint import ShuffledOrder


class Sampler(Protocol):
    """The order of one rank's steps, epoch by epoch."""

    @property
    def next_step(self) -> int:
        """The first step that a checkpoint of this epoch needs."""

    def refuses(self, next_step: int) -> bool:
        """Whether a checkpoint with this next step releases steps that the epoch still needs."""

    def part(self, worker: int, workers: int) -> tuple[ShuffledOrder, int]:
        """The order of one of a loader's workers in the remaining steps, and its place there."""
