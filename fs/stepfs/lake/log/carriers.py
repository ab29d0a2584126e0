"""Carriers: commits that carry the stored bytes of those before them, so that many are read by few requests.

Version v carries v-7 … v-1 if v + 1 is a multiple of 8; of 64, it carries the carriers v-56, v-48, … v-8 and v-7 … v-1, 63
versions in all. Nothing that is carried is believed: a run of versions is proved by the chain of digests up to its
carrier's own, and one that fails is read singly. A writer carries what it knows, and may carry nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.commit import Commit, chain_digest, decode_commit
from stepfs.format.ids import Version
from stepfs.format.snapshot import LogState
from stepfs.lake.log.apply import read_commit, read_versions
from stepfs.store.api import Store

LEVELS: Final = (8, 64)
CARRIED_BYTES_MAX: Final = 512 << 10
_KNOWN_BYTES_MAX: Final = 4 * CARRIED_BYTES_MAX
_RUN_MAX: Final = 1024  # versions that are in memory together while they are read

Known = dict[Version, tuple[Commit, bytes]]


def carriers_of(version: int) -> list[int]:
    """The versions that may carry this one, nearest first."""
    carriers = (version // level * level + level - 1 for level in LEVELS)
    return [carrier for carrier in dict.fromkeys(carriers) if carrier > version]


def carriers_behind(version: int) -> list[int]:
    """The next carrier of each level behind a version, the farthest first, and the next version."""
    found = ((version + 1) // level * level + level - 1 for level in reversed(LEVELS))
    return list(dict.fromkeys((*found, version + 1)))


def first_carried(version: int) -> int:
    """The first version of those that `version` may carry; `version` itself if it is no carrier."""
    return next((version + 1 - level for level in reversed(LEVELS) if (version + 1) % level == 0), version)


def reading_plan(wanted: Sequence[int], level_max: int = LEVELS[-1]) -> list[int]:
    """The fewest of the wanted versions (rising) that have them all, if each carrier up to this level carries what it may."""
    plan: list[int] = []
    levels = [level for level in reversed(LEVELS) if level <= level_max]
    for version in wanted:
        if not plan or version > plan[-1]:
            carriers = (version // level * level + level - 1 for level in levels)
            plan.append(next((carrier for carrier in carriers if carrier <= wanted[-1]), version))
    return plan


def unfolded(commit: Commit, body: bytes, after: int, nested: int = len(LEVELS)) -> list[tuple[Commit, bytes]]:
    """The commit behind all that it carries of versions above `after`, as far as that can be read."""
    found = [(commit, body)]
    for inner in reversed(commit.carried if nested else ()):
        if found[0][0].version <= after + 1:
            break
        try:
            carried = decode_commit(inner, f"carried by log version {commit.version}")
        except (CorruptError, NewerFormatError):
            break
        found[:0] = unfolded(carried, inner, after, nested - 1)
    return [each for each in found if each[0].version > after]


def _first_within(commit: Commit) -> int:
    """The first version that it has, by its own word."""
    first = commit
    for _ in LEVELS:
        if first.carried:
            with suppress(CorruptError, NewerFormatError):
                first = decode_commit(first.carried[0], "carried")
    return first.version


class Newest:
    """The stored bytes of the newest versions, which a writer's next commit may carry."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[bytes, int]] = OrderedDict()  # version → bytes, the first one within them
        self._bytes = 0

    def keep(self, commit: Commit, body: bytes) -> None:
        self._known[commit.version] = body, _first_within(commit)
        self._bytes += len(body)
        while len(self._known) > LEVELS[-1] or self._bytes > _KNOWN_BYTES_MAX:
            self._bytes -= len(self._known.popitem(last=False)[1][0])

    def clear(self) -> None:
        self._known.clear()
        self._bytes = 0

    def carried_by(self, commit: Commit) -> Commit:
        """The same commit with what it may carry, as far as that is known here and not too much: the versions before it."""
        low, at, size, found = first_carried(commit.version), commit.version - 1, 0, list[bytes]()
        while at >= low and (known := self._known.get(at)) is not None:
            body, first = known
            size += len(body)
            if size > CARRIED_BYTES_MAX:
                break
            found.append(body)
            at = min(first, at) - 1
        return replace(commit, carried=tuple(reversed(found)))


async def read_run(
    store: Store,
    lake_id: str,
    state: LogState,
    versions: Sequence[Version],
    last_read: tuple[Commit, bytes] | None = None,
) -> AsyncGenerator[tuple[Commit, bytes]]:
    """Commits and their stored bytes, of versions that follow `state` without a gap; stops early at one that was deleted.

    Each is the log's own or proved by it. `CorruptError`, `NewerFormatError` at a version that neither can be read nor is
    carried by another one of these. `last_read`: the last of them, if it was read.
    """
    digest, last = state.digest, state.version
    for start in range(0, len(versions), _RUN_MAX):
        part = versions[start : start + _RUN_MAX]
        known, direct = await _known(store, lake_id, part, last, last_read)
        for run in _runs(part, known, direct):
            for version in [] if _is_proved(run, known, digest, last) else run[:-1]:
                read = await read_commit(store, lake_id, version)
                if read is None:
                    return
                known[version] = read
            for version in run:
                commit, body = known[version]
                digest, last = chain_digest(commit.prev_digest, body), version
                yield commit, body
        for version in part[last + 1 - part[0] :]:  # what no run has proved is read singly, and so is what ends here
            read = await read_commit(store, lake_id, version)
            if read is None:
                return
            digest, last = chain_digest(read[0].prev_digest, read[1]), version
            yield read


async def _known(
    store: Store,
    lake_id: str,
    versions: Sequence[Version],
    after: Version,
    last_read: tuple[Commit, bytes] | None = None,
) -> tuple[Known, set[Version]]:
    """What these versions hold by the log itself or by a carrier, and which of them were read. Those that cannot are left out."""
    known: Known = {}
    direct: set[Version] = set()
    if last_read is not None and last_read[0].version in versions:
        known = {each.version: (each, stored) for each, stored in unfolded(*last_read, after)}
        direct.add(last_read[0].version)
    for level in (*reversed(LEVELS), 1):
        missing = [version for version in versions if version not in known]
        plan = (
            [Version(version) for version in reading_plan(missing, level) if version not in direct] if missing else []
        )
        async with aclosing(read_versions(store, lake_id, plan)) as bodies:
            async for key, body in bodies:
                try:
                    commit = decode_commit(body, key)
                except (CorruptError, NewerFormatError):
                    continue
                for each, stored in unfolded(commit, body, after):
                    known.setdefault(each.version, (each, stored))
                known[commit.version] = commit, body
                direct.add(commit.version)
    return known, direct


def _runs(versions: Sequence[Version], known: Known, direct: set[Version]) -> Iterator[list[Version]]:
    """The versions in pieces that each end with one that was read; up to the first that is not known."""
    run: list[Version] = []
    for version in versions:
        if version not in known:
            return
        run.append(version)
        if version in direct:
            yield run
            run = []


def _is_proved(run: Sequence[Version], known: Known, digest: bytes, last: Version) -> bool:
    """Whether these follow each other by their digests, from `last` on: then nothing that a carrier says is believed."""
    for version in run if len(run) > 1 else ():
        commit, body = known[version]
        if (commit.version, commit.prev_digest) != (last + 1, digest):
            return False
        digest, last = chain_digest(digest, body), version
    return True
