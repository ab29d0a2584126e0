"""One page of a LIST as entries, with ages by the server's clock alone: its LastModified against its own Date."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from stepfs.store.api import Entry

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_RESOLUTION_S: Final = 1.0  # of a Date header and of most servers' LastModified; both are truncated


def page_entries(page: ListObjectsV2OutputTypeDef, prefix: str, *, ages: bool) -> list[Entry]:
    """The entries of one answer, keys without `prefix`. Without a readable Date every age is 0: unknown."""
    now = _date(page) if ages else None
    found = []
    for item in page.get("Contents", []):
        age_s = 0.0
        if now is not None and "LastModified" in item:
            age_s = max(0.0, (now - item["LastModified"]).total_seconds() - _RESOLUTION_S)
        found.append(Entry(item["Key"].removeprefix(prefix), item["Size"], age_s))
    return found


def _date(page: ListObjectsV2OutputTypeDef) -> datetime | None:
    said = page.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        when = parsedate_to_datetime(said)
    except (ValueError, TypeError):
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
