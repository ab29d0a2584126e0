"""The positions of one producer in a lake's log: one behind each of its commits, found by step.

Commits of live steps are never reclaimed. Steps that a fork took over from its parent have their commits there.
"""

from __future__ import annotations

from dataclasses import dataclass

from stepfs.errors import AbsentError
from stepfs.format.ids import Epoch, Step, Version
from stepfs.lake.log.reader import LogReader
from stepfs.lake.planned import commit_of
from stepfs_producer.plan.state import State, read_position
from stepfs_producer.tgb_writer import unpack_position


@dataclass(frozen=True, slots=True)
class CommitBehind:
    """A commit: its steps, and the state of the plan behind the last of them."""

    steps: range
    state: State
    first: bool  # of its producer
    epoch: Epoch  # of the producer: which of its incarnations


class Positions:
    """Of one producer. Each commit is read once."""

    def __init__(self, log: LogReader, producer_id: str) -> None:
        self.producer_id = producer_id
        origins = log.state.origins
        self.first = Step(max(log.first_live_step, origins[0].end if origins else 0))
        self.why_first = (
            f"they are of {origins[0].url}"
            if origins and self.first == origins[0].end
            else "those before were reclaimed"
        )
        self.end = log.state.next_step
        self._log = log
        self._known: dict[Version, CommitBehind] = {}

    async def at(self, step: int) -> CommitBehind | None:
        """The commit with the producer's first step from `step` on; None if there is none."""
        return await self._first_in(range(step, self.end))

    async def before(self, step: int) -> CommitBehind | None:
        """The producer's newest commit that ends at or before `step`; None if none is left."""
        return await self._first_in(range(step - 1, self.first - 1, -1))

    async def _first_in(self, steps: range) -> CommitBehind | None:
        for number in steps:
            entry = await self._log.entry(Step(number))
            if entry.producer_id == self.producer_id:
                return await self._read(entry.version)
        return None

    async def _read(self, version: Version) -> CommitBehind:
        if version not in self._known:
            commit = await commit_of(self._log.store, self._log.identity.lake_id, version)
            if commit is None:
                raise AbsentError(f"{self._log.store.url}: version {version} of the log is gone; try again")
            self._known[version] = CommitBehind(
                range(commit.first_step, commit.next_step),
                read_position(unpack_position(commit.position)),
                commit.next_seq == len(commit.tgbs),
                commit.epoch,
            )
        return self._known[version]
