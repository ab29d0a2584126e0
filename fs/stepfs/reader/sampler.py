"""The sampler that a reader knows: `stepfs.shuffled_steps.ShuffledSteps` is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stepfs.data.hints import ShuffledOrder


class Sampler(Protocol):
    """The order of one rank's steps, epoch by epoch."""

    @property
    def next_step(self) -> int:
        """The first step that a checkpoint of this epoch needs."""

    def refuses(self, next_step: int) -> bool:
        """Whether a checkpoint with this next step releases steps that the epoch still needs."""

    @property
    def order(self) -> ShuffledOrder:
        """The order of this epoch."""

    @property
    def position(self) -> int:
        """The place at which a pass through the order begins."""

    def state_dict(self) -> dict[str, int]:
        """The arguments that determine the order."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on in the epoch of `state`. `RefusedError` for another order."""
