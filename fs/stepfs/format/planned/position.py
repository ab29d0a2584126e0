"""The facts about sources in the position of a planned producer, for readers that only show them.

The commit protocol never looks into a position. `stepfs-produce run` stores a msgpack map in it, of which this is the part
that people want to see:

    {"pipeline": "plan", "v": 1, "plan": digest, "step": …, "tokenizer": identity, "held_out": …, "sources": {name:
     [identity, listing, epoch, fragment, block, taken, into, debt, records, skipped, run, tokens]}}

Anything else is the position of another program, and none of our business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stepfs.errors import CorruptError
from stepfs.format.codec import Value, unpack

_VERSION: Final = 1
_FIELDS: Final = 12
_LISTING, _EPOCH, _RECORDS, _SKIPPED, _TOKENS = 1, 2, 8, 9, 11
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SourceStanding:
    """One source, over all steps of the plan. `listing`: digest of its files, which does not change; "" if it is none.
    `epoch`: the one being read, from 0.
    """

    listing: str
    tokens: int
    records: int
    skipped: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanStanding:
    """A plan behind its newest committed step."""

    digest: str
    step: int
    sources: Mapping[str, SourceStanding]

    def document(self) -> dict[str, Any]:
        """As in JSON documents; sources in order of names. `share`: of the tokens of all sources."""
        total = sum(source.tokens for source in self.sources.values())
        return {
            "digest": self.digest,
            "step": self.step,
            "tokens": total,
            "sources": {
                name: {
                    "tokens": source.tokens,
                    "share": round(source.tokens / total, 6) if total else 0.0,
                    "records": source.records,
                    "skipped": source.skipped,
                    "epoch": source.epoch,
                }
                for name, source in sorted(self.sources.items())
            },
        }


def read_plan_position(packed: bytes) -> PlanStanding | None:
    """The facts about a plan in a stored position; None if it is another program's, or of a version unknown here."""
    try:
        position = unpack(packed, "position") if packed else None
    except CorruptError:  # a position need not be msgpack
        return None
    if not isinstance(position, dict) or position.get("pipeline") != "plan":
        return None
    version, digest, sources = (position.get(name) for name in ("v", "plan", "sources"))
    step = _count(position.get("step"))
    if version != _VERSION or isinstance(version, bool) or not isinstance(digest, str):
        return None
    if step is None or not isinstance(sources, dict):
        return None
    found = {}
    for name, fields in sources.items():
        standing = _source(fields)
        if not isinstance(name, str) or standing is None:
            return None
        found[name] = standing
    return PlanStanding(digest, step, found)


def _source(fields: Value) -> SourceStanding | None:
    if not isinstance(fields, list) or len(fields) != _FIELDS:
        return None
    tokens, records, skipped, epoch = (_count(fields[place]) for place in (_TOKENS, _RECORDS, _SKIPPED, _EPOCH))
    if tokens is None or records is None or skipped is None or epoch is None:
        return None
    listing = fields[_LISTING]
    known = isinstance(listing, str) and _DIGEST.fullmatch(listing) is not None
    return SourceStanding(str(listing) if known else "", tokens, records, skipped, epoch)


def _count(value: Value) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
