"""The bounds of one producer, checked once: memory, delay, lead, parallelism, patience."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stepfs.errors import UsageError

MAX_PENDING_BYTES: Final = 512 << 20
MAX_DELAY_S: Final = 5.0
UPLOADS: Final = 8
GIVE_UP_AFTER_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """See `stepfs_producer.producer.AsyncProducer` for what each means; `UsageError` if one makes no sense."""

    max_pending_bytes: int = MAX_PENDING_BYTES
    max_delay: float = MAX_DELAY_S
    max_lead: int | None = None
    max_lead_bytes: int | None = None
    uploads: int = UPLOADS
    give_up_after: float = GIVE_UP_AFTER_S

    def __post_init__(self) -> None:
        for name in ("max_pending_bytes", "uploads", "max_lead", "max_lead_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}={value}: use at least 1")
        for name in ("max_delay", "give_up_after"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name}={getattr(self, name)}: use seconds from 0 on")
