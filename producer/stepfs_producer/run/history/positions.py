"""The positions of one producer in a lake's log: one behind each of its commits, found by step.

Commits of live steps are never reclaimed. Steps that a fork took over from its parent have their commits there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from stepfs.errors import AbsentError
from stepfs.format.ids import SEGMENT_STEPS, Epoch, Step, Version
from stepfs.lake.kept_plans import commit_of
from stepfs.lake.log.reader import LogReader
from stepfs_producer.commit.uploads import unpack_position
from stepfs_producer.plan.step import State, read_position


@dataclass(frozen=True, slots=True)
class CommitBehind:
    """A commit: its steps, and the state of the plan behind the last of them."""

    steps: range
    state: State
    first: bool  # of its producer
    epoch: Epoch  # of the producer: which of its incarnations


class Positions:
    """The positions of one producer. Each commit is read once, and so is each segment, however many others' steps it has."""

    def __init__(self, log: LogReader, producer_id: str) -> None:
        self.producer_id = producer_id
        origins = log.state.origins
        self.first = Step(max(log.first_live_step, origins[0].end if origins else 0))
        self.why_first = (
            f"they are of {origins[0].url}"
            if origins and self.first == origins[0].end
            else "those before were reclaimed"
        )
        self.end = log.state.next_step  # lower, once steps behind the producer's newest commit were seen
        self._log = log
        self._newest = log.state.producers[producer_id].version
        self._own: dict[int, list[tuple[Step, Version]]] = {}  # the producer's steps, by segment
        self._known: dict[Version, CommitBehind] = {}

    async def at(self, step: int) -> CommitBehind | None:
        """The commit with the producer's first step from `step` on; None if there is none."""
        index = step // SEGMENT_STEPS
        while index * SEGMENT_STEPS < self.end:
            own = await self._in_segment(index)
            place = bisect_left(own, (step,))
            if place < len(own):
                return await self._read(own[place][1])
            index += 1
        return None

    async def before(self, step: int) -> CommitBehind | None:
        """The producer's newest commit that ends at or before `step`; None if none is left."""
        for index in range((step - 1) // SEGMENT_STEPS, self.first // SEGMENT_STEPS - 1, -1):
            own = await self._in_segment(index)
            place = bisect_left(own, (step,))
            if place:
                return await self._read(own[place - 1][1])
        return None

    async def _in_segment(self, index: int) -> list[tuple[Step, Version]]:
        if index not in self._own:
            own = []
            steps = range(max(self.first, index * SEGMENT_STEPS), min(self.end, (index + 1) * SEGMENT_STEPS))
            for step in map(Step, steps):
                entry = await self._log.entry(step)
                if entry.version > self._newest:
                    self.end = step
                    break
                if entry.producer_id == self.producer_id:
                    own.append((step, entry.version))
            self._own[index] = own
        return self._own[index]

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
