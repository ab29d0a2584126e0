"""Snapshots: finding the newest that the log confirms, and writing one off the hot path.

Contents are a function of the history alone: two writers agree, a stale writer is harmless (hazard 11). Readers skip a
damaged snapshot and use an older one.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError, StoreUnreachableError
from stepfs.format.commit import chain_digest, decode_commit
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SEGMENT_STEPS, SegmentIndex, Version
from stepfs.format.keys import extent, index_prefix, log_prefix, number_of, numbered, snapshot_prefix
from stepfs.format.snapshot import LogState, Segment, decode_snapshot, encode_segment, encode_snapshot, genesis
from stepfs.lake.concurrency import together
from stepfs.lake.control import Control
from stepfs.lake.create_once import SlotLost, last_number, listed_slots, settled, take_slot
from stepfs.lake.log.apply import ChainError, apply, read_commit, read_versions
from stepfs.lake.log.index import Segments
from stepfs.store.api import Store

_log = logging.getLogger("stepfs.lake.log")

_VERSIONS_MAX: Final = 1024
_CANDIDATES_MAX: Final = 16
_PAGE: Final = 1000  # of a LIST

Beside = Callable[[Version], Awaitable[object]]  # is called with the version of a snapshot, while that is read


def snapshot_due(before: LogState, after: LogState) -> bool:
    """Whether the commit from `before` to `after` makes its writer responsible for a snapshot at `after`."""
    if after.sealed_segments > before.sealed_segments:
        return True
    return after.version // _VERSIONS_MAX > max(before.version, 0) // _VERSIONS_MAX


@dataclass(slots=True)
class PassedOver:
    """Snapshots that exist but cannot be read."""

    newest: Version | None = None
    why: str = ""
    newer_format: NewerFormatError | None = None

    def note(self, version: Version, error: CorruptError | NewerFormatError) -> None:
        if self.newest is None or version > self.newest:
            self.newest, self.why = version, str(error)
        if isinstance(error, NewerFormatError):
            self.newer_format = error

    def check_reached(self, head: Version, url: str) -> None:
        """`CorruptError` unless a log that ends at `head` reaches the newest of them: commits never disappear."""
        if self.newest is not None and head < self.newest:
            raise CorruptError(
                f"{url}: log version {head + 1} is missing, and the snapshot of version {self.newest} that would stand "
                f"in for it is damaged ({self.why}); restore either"
            )


async def newest_snapshot(
    store: Store,
    identity: LakeIdentity,
    control: Control,
    *,
    passed_over: PassedOver | None = None,
    lenient: bool = False,
    beside: Beside | None = None,
) -> LogState:
    """The newest snapshot whose digest the log confirms; the genesis state if there is none (and may be none).

    `NewerFormatError` if the only snapshots are those of a newer stepfs. `lenient`: see `Control.refresh`.
    """
    passed_over = passed_over or PassedOver()
    while True:
        async with aclosing(confirmed_snapshots(store, identity, passed_over=passed_over, beside=beside)) as states:
            async for state in states:
                control.hint = max(control.hint, state.control)
                return state
        moved = await control.refresh(lenient=lenient)
        if control.floor == 0:
            return genesis(identity.lake_id, identity.slices)
        if not moved:
            break
        # Else the listed snapshots may have been reclaimed meanwhile; the reclaimer left a newer one.
    if passed_over.newer_format is not None:
        raise passed_over.newer_format
    raise CorruptError(
        f"{store.url}: the log starts at version {control.floor} and no readable snapshot covers what was before; "
        "restore the newest object under snapshot/"
    )


async def confirmed_snapshots(
    store: Store,
    identity: LakeIdentity,
    *,
    at_most: Version | None = None,
    passed_over: PassedOver | None = None,
    beside: Beside | None = None,
) -> AsyncGenerator[LogState, None]:
    """Snapshots whose digest the log confirms, newest first; two GETs each, made as the caller iterates.

    `beside` is called for the first one alone.
    """
    prefix = snapshot_prefix(identity.lake_id)
    for version in await _candidates(store, prefix, at_most):
        key = numbered(prefix, version)
        try:
            also, beside = beside, None
            state = await _read_confirmed(store, identity, key, version, also)
        except ChainError as error:
            _log.info("snapshot %s is not of this history: %s", key, error)
            continue
        except (CorruptError, NewerFormatError) as error:
            _log.warning("snapshot %s is unreadable, using an older one: %s", key, error)
            if passed_over is not None:
                passed_over.note(version, error)
            continue
        if state is not None:
            yield state


async def _candidates(store: Store, prefix: str, at_most: Version | None) -> list[Version]:
    """Versions of existing snapshots, newest first, a bounded number of them: they are at most `_VERSIONS_MAX` versions apart
    in practice.
    """
    page = await store.list(prefix, limit=_PAGE)
    listed: Collection[int] = {n for entry in page if (n := number_of(prefix, entry.key)) is not None}
    newest = max(listed, default=-1)
    if len(page) == _PAGE:
        newest = max(newest, await last_number(store, prefix, after=newest) or -1)
    newest = newest if at_most is None else min(newest, at_most)
    if len(page) == _PAGE:
        listed = await listed_slots(store, prefix, after=newest - _CANDIDATES_MAX * _VERSIONS_MAX)
    return [Version(n) for n in sorted(listed, reverse=True) if n <= newest][:_CANDIDATES_MAX]


async def _read_confirmed(
    store: Store, identity: LakeIdentity, key: str, version: Version, beside: Beside | None
) -> LogState | None:
    """One snapshot, checked against `log/<version>`; None if either was reclaimed meanwhile."""
    log_key = numbered(log_prefix(identity.lake_id), version)

    async def nothing() -> None:
        if beside is not None:
            await beside(version)

    data, body, _ = await together(partial(store.get, key), partial(store.get, log_key), nothing)
    if data is None or body is None:
        return None
    state = decode_snapshot(data, key)
    if (state.lake_id, state.version, state.slices) != (identity.lake_id, version, identity.slices):
        raise CorruptError(f"{key}: snapshot of lake {state.lake_id} at version {state.version}")
    try:
        digest = chain_digest(decode_commit(body, log_key).prev_digest, body)
    except (CorruptError, NewerFormatError):
        # The next commit names the digest as well: a reader can follow the log without a commit that a snapshot
        # covers.
        following = await _digest_before(store, identity, Version(version + 1))
        if following is None:
            raise
        digest = following
    if digest != state.digest:
        raise ChainError(f"{key}: digest differs from the log's")
    return state


async def log_contains(store: Store, identity: LakeIdentity, state: LogState) -> bool:
    """Whether the log has the commit that a state ends with: the store may have been rolled back since it was read."""
    if state.version < 0:
        return True  # every log begins so
    found = await read_commit(store, identity.lake_id, state.version)
    return found is not None and chain_digest(found[0].prev_digest, found[1]) == state.digest


async def _digest_before(store: Store, identity: LakeIdentity, version: Version) -> bytes | None:
    """The digest that commit `version` continues; None if there is no such commit. `CorruptError` if it is damaged."""
    found = await read_commit(store, identity.lake_id, version)
    if found is None:
        return None
    commit, _ = found
    if (commit.lake_id, commit.version) != (identity.lake_id, version):
        key = numbered(log_prefix(identity.lake_id), version)
        raise CorruptError(f"{key}: is version {commit.version} of lake {commit.lake_id}")
    return commit.prev_digest


async def write_snapshot(
    store: Store, identity: LakeIdentity, state: LogState, segments: Segments, control: Control
) -> None:
    """Write the snapshot of a Committed state and every segment it needs that is not there yet.

    Normally two creates and a LIST: the segment that just filled up is in `segments`. If an earlier writer died
    between its commit and its snapshot, the missing segments are rebuilt from the log. A reclaim that passes `state`
    meanwhile has ensured a newer snapshot: then nothing is left to do.
    """
    while control.floor <= max(state.version, 0):
        before = control.floor
        try:
            await _write_snapshot(store, identity, state, segments, control)
        except CorruptError:
            # A missing object may have been reclaimed; it is damage only if the floor did not move.
            await control.refresh()
            if control.floor == before:
                raise
        else:
            return


async def _write_snapshot(
    store: Store, identity: LakeIdentity, state: LogState, segments: Segments, control: Control
) -> None:
    base = await newest_snapshot(store, identity, control)
    if base.version >= state.version:
        return  # whoever slept until then may find none of its own time
    live = max(base.sealed_segments, control.first_live_step // SEGMENT_STEPS)  # the base may be an old one
    wanted = range(live, state.sealed_segments)
    found = {SegmentIndex(index): segments.get(SegmentIndex(index)) for index in wanted}
    if any(segment is None for segment in found.values()):
        async with aclosing(_folded(store, identity, base, state.version)) as rebuilt:
            found |= {segment.index: segment async for segment in rebuilt if segment.index in wanted}

    async def look() -> None:
        if not await log_contains(store, identity, state):
            raise CorruptError(
                f"{store.url}: log version {state.version} is gone; its snapshot would be of another history"
            )

    for segment in found.values():
        assert segment is not None
        await look()
        key = extent(index_prefix(identity.lake_id), segment.index)
        await _create(store, key, encode_segment(identity.lake_id, identity.slices, segment), look)
    if not found:
        await look()
    snapshot = encode_snapshot(state.trimmed(control.first_live_step))
    await _create(store, numbered(snapshot_prefix(identity.lake_id), state.version), snapshot, look)


async def rebuilt_segment(
    store: Store, identity: LakeIdentity, control: Control, index: SegmentIndex, head: Version
) -> Segment | None:
    """A segment that filled up before version `head`, from the log, which has it until a confirmed snapshot covers it.

    None if one covers it: then it was stored before that snapshot, and if it is gone, that is damage to report.
    """
    base = await newest_snapshot(store, identity, control)
    if base.sealed_segments > index:
        return None
    async with aclosing(_folded(store, identity, base, head)) as segments:
        async for segment in segments:
            if segment.index == index:
                return segment
    return None


async def _folded(
    store: Store, identity: LakeIdentity, base: LogState, until: Version
) -> AsyncGenerator[Segment, None]:
    """The segments that fill up between the state `base` and version `until`. `CorruptError` if the log has a hole."""
    state = base
    versions = [Version(number) for number in range(base.version + 1, until + 1)]
    async with aclosing(read_versions(store, identity.lake_id, versions)) as bodies:
        async for key, body in bodies:
            applied = apply(state, decode_commit(body, key), body)
            state = applied.state
            for segment in applied.segments:
                yield segment
    if state.version < until:
        raise CorruptError(f"{store.url}: log version {state.version + 1} is missing below the head")


async def _create(store: Store, key: str, body: bytes, look: Callable[[], Awaitable[object]]) -> None:
    """Create an object whose content follows from history: another writer's equal or equivalent bytes are as good. `look`
    raises if it is of another history by now: its name does not say so.

    A name that is "taken" but not readable is an error: a snapshot must never name a segment that does not exist.
    """
    outcome = settled(await take_slot(store, key, body, look), store, f"a snapshot waits for {key}")
    if outcome == SlotLost(taken=False):
        raise StoreUnreachableError(f"{key}: the store does not show what it calls taken; a snapshot waits for that")
