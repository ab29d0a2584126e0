"""The commits of a damaged log from the damage on: no reader can follow them, but some can be read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass

from stepfs.errors import CorruptError, NewerFormatError
from stepfs.format.commit import decode_commit
from stepfs.format.ids import Step, Version
from stepfs.format.keys import log_prefix
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.tail import read_versions
from stepfs.lake.slots import listed_slots


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The contents that a fork up to the damage lacks, as far as they are known."""

    commits: int  # objects in the log from the first damaged version on
    next_step: Step  # one past the last step that is known to have been committed
    next_seqs: Mapping[str, int]  # of producers known to have committed more


async def left_out(reader: LogReader) -> LeftOut:
    """Read the commits from the damage on; zero commits for a reader without damage."""
    if reader.damage is None:
        return LeftOut(0, reader.state.next_step, {})
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
    return LeftOut(len(listed), next_step, next_seqs)
