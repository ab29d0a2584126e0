"""The commits that a fork leaves out: from damage on, where no reader can follow but some can be read; and from a cut on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError, RefusedError, UsageError
from stepfs.format.commit import Commit, CommitKind, decode_commit
from stepfs.format.ids import Step, Version
from stepfs.format.keys import log_prefix
from stepfs.format.snapshot import ProducerState
from stepfs.lake.log.apply import producer_after
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.apply import read_commit, read_versions
from stepfs.lake.slots import listed_slots

_BACK_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class UnreachableCommits:
    """The contents that a fork up to the damage lacks, as far as they are known."""

    commits: int  # objects in the log from the first damaged version on
    next_step: Step  # one past the last step that is known to have been committed
    next_seqs: Mapping[str, int]  # of producers known to have committed more


async def left_out(reader: LogReader) -> UnreachableCommits:
    """Read the commits from the damage on; zero commits for a reader without damage."""
    if reader.damage is None:
        return UnreachableCommits(0, reader.state.next_step, {})
    prefix, first = log_prefix(reader.identity.lake_id), reader.damage.version
    listed = await listed_slots(reader.store, prefix, after=first - 1)
    next_step = reader.state.next_step
    next_seqs: dict[str, int] = {}
    versions = list(map(Version, listed))
    async with aclosing(read_versions(reader.store, reader.identity.lake_id, versions)) as bodies:
        async for key, body in bodies:
            try:
                commit = decode_commit(body, key)
            except (CorruptError, NewerFormatError):
                continue
            next_step = max(next_step, commit.next_step)
            known = reader.state.producers.get(commit.producer_id)
            if commit.next_seq > (known.next_seq if known else 0):
                next_seqs[commit.producer_id] = commit.next_seq
    return UnreachableCommits(len(listed), next_step, next_seqs)


async def producers_before(reader: LogReader, step: Step) -> dict[str, ProducerState]:
    """The producers as they stood when all steps before `step` were committed, and no other.

    `UsageError` if a commit holds steps on both sides. `RefusedError` if the log no longer says where one of them stood.
    """
    state, store, lake_id = reader.state, reader.store, reader.identity.lake_id
    if step == state.next_step:
        return dict(state.producers)
    cut = (await reader.entry(step)).version
    found = await read_commit(store, lake_id, cut)
    if found is None or found[0].kind is CommitKind.ORIGIN:
        raise RefusedError(
            f"{store.url}: the log does not say where producers stood at step {step}; leave --rewind out"
        )
    if found[0].first_step != step:
        first, end = found[0].first_step, found[0].next_step
        raise UsageError(f"--until {step}: one commit holds steps {first} to {end - 1}; use --until {first} or {end}")
    moved: dict[str, Commit] = {}  # the first commit of each behind the cut
    async for commit in _commits(reader, cut, state.version):
        if commit.kind not in {CommitKind.SEAL, CommitKind.ORIGIN}:
            moved.setdefault(commit.producer_id, commit)
    stood = {name: producer for name, producer in state.producers.items() if name not in moved}
    sought = {name for name, commit in moved.items() if (commit.kind, commit.epoch) != (CommitKind.EPOCH, 1)}
    last, floor = Version(cut - 1), reader.control.floor
    while last >= floor and not sought <= stood.keys():
        begin = Version(max(floor, last - _BACK_AT_ONCE + 1))
        latest = {commit.producer_id: commit async for commit in _commits(reader, begin, last)}
        stood |= {name: producer_after(latest[name]) for name in sought - stood.keys() if name in latest}
        last = Version(begin - 1)
    for name in sorted(sought - stood.keys()):
        raise RefusedError(f"{store.url}: where producer {name} stood at step {step} was reclaimed; leave --rewind out")
    return dict(sorted(stood.items()))


async def _commits(reader: LogReader, first: Version, last: Version) -> AsyncIterator[Commit]:
    versions = list(map(Version, range(first, last + 1)))
    async with aclosing(read_versions(reader.store, reader.identity.lake_id, versions)) as bodies:
        async for key, body in bodies:
            yield decode_commit(body, key)
