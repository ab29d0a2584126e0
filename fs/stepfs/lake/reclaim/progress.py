"""Where the last run stood, for a reclaimer that is a new process each time (a timer, a CronJob).

One small object, overwritten by each run that did something, and advisory: without it a run reads the log from the newest
snapshot, and searches all of `data/` for orphans. It holds the log's state, so that the next run reads on from there, and
knows which producers have started again since.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError, StepfsError
from stepfs.format.codec import Kind, decode, encode
from stepfs.format.commit import chain_digest
from stepfs.format.ids import Step, Version
from stepfs.format.keys import reclaim_key
from stepfs.format.records import LakeIdentity
from stepfs.format.snapshot import LogState, decode_snapshot, encode_snapshot
from stepfs.lake.control import Control
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.tail import read_commit
from stepfs.lake.reclaim.plan import Target
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.reclaim")

_NEAR: Final = 16  # versions; from a state that is further back, the newest snapshot is the shorter way


@dataclass(frozen=True, slots=True)
class Progress:
    """After a run: nothing was left below `swept`, and no orphan of an incarnation that `state` knows to be over."""

    control: int  # the newest control record; 0 also if there is none
    swept: Target
    searched_ms: int  # when a run last searched all of `data/`
    state: LogState


async def read_progress(store: Store, identity: LakeIdentity) -> Progress | None:
    """None if there is none that can be read."""
    key = reclaim_key(identity.lake_id)
    data = await store.get(key)
    if data is None:
        return None
    try:
        progress = decode_progress(data, key)
    except (CorruptError, NewerFormatError) as error:
        _log.warning("where the last run stood is unreadable, this one begins anew: %s", error)
        return None
    state = progress.state
    return progress if (state.lake_id, state.slices) == (identity.lake_id, identity.slices) else None


async def is_of_the_log(store: Store, state: LogState) -> bool:
    """Whether the log has led to this state. The copy of a lake in use may hold a later record than its log: by that
    one, live steps would be orphans.
    """
    try:
        found = await read_commit(store, state.lake_id, state.version)
    except (CorruptError, NewerFormatError):
        return False
    return found is not None and chain_digest(found[0].prev_digest, found[1]) == state.digest


async def write_progress(store: Store, progress: Progress) -> None:
    """A failure here fails no reclaim: the next run only has more to do."""
    try:
        await store.put(reclaim_key(progress.state.lake_id), [encode_progress(progress)])
    except StepfsError as error:
        _log.info("where this run stood is not on record, so the next one begins anew: %s", error)


def encode_progress(progress: Progress) -> bytes:
    body = {
        "control": progress.control,
        "first_live_step": progress.swept.first_live,
        "floor": progress.swept.floor,
        "searched": progress.searched_ms,
        "state": encode_snapshot(progress.state.trimmed(progress.swept.first_live)),
    }
    return encode(Kind.RECLAIM, body)


def decode_progress(data: bytes, what: str) -> Progress:
    fields = decode(Kind.RECLAIM, data, what)
    swept = Target(Step(fields.integer("first_live_step")), Version(fields.integer("floor")))
    state = decode_snapshot(fields.binary("state"), what)
    return Progress(fields.integer("control"), swept, fields.integer("searched"), state)


async def open_near(store: Store, identity: LakeIdentity, progress: Progress) -> LogReader | None:
    """A reader at the head, which has read on from `progress`; None if that is far from there, or not of this log."""
    reader = LogReader(store, identity, Control(store, identity, hint=progress.control), progress.state)
    try:
        return reader if await reader.read_on(_NEAR) and await reader.confirm() else None
    except CorruptError:
        return None
