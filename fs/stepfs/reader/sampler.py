"""What a reader knows of a sampler: `stepfs.shuffled_steps.ShuffledSteps` is one."""

from __future__ import annotations

from typing import Protocol

from stepfs.data.prefetch.order_hint import ShuffledOrder


class Sampler(Protocol):
    """The order of one rank's steps, epoch by epoch."""

    @property
    def next_step(self) -> int:
        """The first step that a checkpoint of this epoch needs."""

    def refuses(self, next_step: int) -> bool:
        """Whether a checkpoint with this next step releases what the epoch still needs."""

    def part(self, worker: int, workers: int) -> tuple[ShuffledOrder, int]:
        """What one of a loader's workers reads of the steps that are left, and its place there."""
