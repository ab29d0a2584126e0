"""Ages of objects by the store's clock alone: its time of an object against its own Date, both truncated to a second."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_RESOLUTION_S: Final = 1.0


def http_date(said: str | None) -> datetime | None:
    """A Date header; None if there is none that can be read."""
    try:
        when = parsedate_to_datetime(said or "")
    except (TypeError, ValueError):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def age_s(modified: datetime | None, now: datetime | None) -> float:
    """The least age; 0 where either time is unknown."""
    if now is None or modified is None:
        return 0.0
    return max(0.0, (now - modified).total_seconds() - _RESOLUTION_S)
