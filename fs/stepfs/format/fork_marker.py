"""The marker at a new lake's place until its fork is finished, so that the next start finds the remains of a killed
fork."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError
from stepfs.format.codec import Kind, decode, encode
from stepfs.format.ids import INTEGER_MAX, Step

FORKING: Final = "forking/"
NO_END: Final = Step(INTEGER_MAX)
_URL_BYTES_MAX: Final = 2048
_LAKE_ID: Final = re.compile(r"^[0-9a-f]{32}$")


@dataclass(frozen=True, slots=True)
class Cut:
    """The parent steps of a fork: those before `step`, then those from `step` on outside [skip_first, skip_end).

    None from `until` on.
    """

    step: Step
    skip_first: Step
    skip_end: Step
    until: Step = NO_END


@dataclass(frozen=True, slots=True)
class ForkMarker:
    """`forking/<lake_id>`: a fork that began here, and its parent."""

    lake_id: str  # of the lake being made
    parent_url: str
    parent_id: str
    cut: Cut


def marker_key(lake_id: str) -> str:
    return f"{FORKING}{lake_id}"


def encode_marker(marker: ForkMarker) -> bytes:
    return encode(
        Kind.FORK,
        {
            "lake": marker.lake_id,
            "url": marker.parent_url,
            "parent": marker.parent_id,
            "step": marker.cut.step,
            "skip_first": marker.cut.skip_first,
            "skip_end": marker.cut.skip_end,
            "until": marker.cut.until,
        },
    )


def decode_marker(data: bytes, key: str) -> ForkMarker:
    """`CorruptError` unless the id matches the key: undoing a fork finds its objects by this id."""
    fields = decode(Kind.FORK, data, key)
    lake_id, parent_id = fields.text("lake"), fields.text("parent")
    if not _LAKE_ID.fullmatch(lake_id) or not _LAKE_ID.fullmatch(parent_id) or marker_key(lake_id) != key:
        raise CorruptError(f"{key}: marks lake {lake_id!r} of parent {parent_id!r}")
    return ForkMarker(
        lake_id=lake_id,
        parent_url=fields.text("url", bytes_max=_URL_BYTES_MAX),
        parent_id=parent_id,
        cut=Cut(
            step=Step(fields.integer("step")),
            skip_first=Step(fields.integer("skip_first")),
            skip_end=Step(fields.integer("skip_end")),
            until=Step(fields.integer("until")),
        ),
    )
