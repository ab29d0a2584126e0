"""The settings of one producer, checked once: memory, delay, lead, parallelism, patience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepfs.errors import UsageError
from stepfs.format.arguments import check_integer

MAX_PENDING_BYTES: Final = 512 << 20
MAX_DELAY_S: Final = 5.0
UPLOADS: Final = 8
GIVE_UP_AFTER_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """What `Producer` and `AsyncProducer` take as keywords; `UsageError` if a value makes no sense."""

    # Payload bytes held in memory until they are committed; also the largest batch.
    max_pending_bytes: int = MAX_PENDING_BYTES
    # Seconds a durable batch waits at most for its first commit attempt, unless more producers share the log than can
    # commit that often (logged once; see `AsyncProducer.pacing`).
    max_delay: float = MAX_DELAY_S
    # Steps that the lake may run ahead of its slowest consumer group: more than lie between two checkpoints. None: any.
    max_lead: int | None = None
    # Payload bytes that may be live in the lake: committed by anybody, and not reclaimed. None: any.
    max_live_bytes: int | None = None
    # Whether the bounds of the lead hold while no consumer group is registered. False: no bound then, and one warning.
    max_lead_without_groups: bool = True
    # Uploads under way at a time.
    uploads: int = UPLOADS
    # Seconds without an answer from the store until `StoreUnreachableError`.
    give_up_after: float = GIVE_UP_AFTER_S

    def __post_init__(self) -> None:
        for name in ("max_pending_bytes", "uploads", "max_lead", "max_live_bytes"):
            value = getattr(self, name)
            if value is not None and check_integer(value, name) < 1:
                raise UsageError(f"{name}={value}: use at least 1")
        for name in ("max_delay", "give_up_after"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: use seconds from 0 on")
