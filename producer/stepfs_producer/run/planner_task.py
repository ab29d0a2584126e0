"""Decides the next step as soon as enough samples have arrived, and gives loaders their marks for the coming steps."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from stepfs_producer.engine.failover import Tasks
from stepfs_producer.plan.draw import ONE
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.samples import Ahead
from stepfs_producer.plan.step import End, Need, State, StepPlan
from stepfs_producer.run.load import SourceLoader
from stepfs_producer.run.measured import STEPS_AHEAD, Cause, Waits, marks_of

_log = logging.getLogger("stepfs.producer")

TOLD_AFTER_S: Final = 60.0  # of waiting for a source; its tasks are made to take a quarter of a second
_SHARES_SEEN: Final = 2  # of a step, that the planner sees at first; samples beyond a step cannot change it


class PlannerTask:
    """The planner of a run and the loaders that feed it."""

    def __init__(
        self,
        rules: Rules,
        loadings: Mapping[str, SourceLoader],
        *,
        tasks: Tasks,
        waits: Waits,
        held_bytes_max: int | None = None,
    ) -> None:
        self._rules = rules
        self._planner = Planner(rules)
        self._loadings: Sequence[SourceLoader] = [loadings[name] for name in sorted(rules.sources)]
        self._tasks = tasks
        self._waits = waits
        self._held_bytes_max = held_bytes_max
        self._changed = trio.Event()
        self.seconds = 0.0  # of CPU, of the last plan

    def changed(self) -> None:
        self._changed.set()

    def set_marks(self, step: int) -> None:
        """Ask every loader for its share of the steps from `step` on, and of the workers."""
        rules = self._rules
        shares = [rules.mix.shares(step + later) for later in range(STEPS_AHEAD)]
        coming = [sum(of_source) * rules.step_tokens // ONE for of_source in zip(*shares, strict=True)]
        marks = marks_of(coming, [loading.work for loading in self._loadings], self._tasks.workers)
        nbytes = sum(
            tokens * loading.work.bytes_per_token for loading, (tokens, _) in zip(self._loadings, marks, strict=True)
        )
        bound = self._held_bytes_max
        share = 1.0 if bound is None or nbytes <= bound else bound / nbytes
        for loading, (tokens, parallel) in zip(self._loadings, marks, strict=True):
            loading.want(tokens=int(tokens * share), parallel=parallel)

    async def next(self, state: State) -> StepPlan | End:
        """The step of `state`, as soon as the samples that have arrived decide it."""
        seen = self._seen(state.step)
        while True:
            self.set_marks(state.step)  # again after each wait: more of the work is known
            self._changed = trio.Event()
            added = {loading.name: loading.added for loading in self._loadings}
            ahead = {loading.name: loading.held.ahead(seen[loading.name]) for loading in self._loadings}
            known = {name: of_source for name, (of_source, _) in ahead.items()}
            planned = await self._planned(state, known)
            if not isinstance(planned, Need):
                return planned
            unseen = [name for name in planned.samples if not ahead[name][1]]
            for name in unseen:
                seen[name] *= 2
            if not unseen:
                await self._wait_for(planned, added)

    async def _planned(self, state: State, known: Mapping[str, Ahead]) -> StepPlan | Need | End:
        """Let a thread plan. Its CPU time is planning; for the rest it waits for a core, which workers' tasks hold."""

        def plan() -> tuple[StepPlan | Need | End, float]:
            began_s = time.thread_time()
            return self._planner.next(state, known), time.thread_time() - began_s

        began_s, before_s = trio.current_time(), self._tasks.held_s()
        planned, self.seconds = await trio.to_thread.run_sync(plan, abandon_on_cancel=True)
        waited_s = trio.current_time() - began_s - self.seconds
        self._waits.note(Cause.PLANNER, self.seconds)
        if waited_s > 0:
            self._waits.note_behind([], waited_s, before_s, self._tasks.held_s())
        return planned

    def _seen(self, step: int) -> dict[str, int]:
        """Tokens of each source to show to the planner at first: it looks at every record that it is shown."""
        tokens = self._rules.step_tokens
        shares = self._rules.mix.shares(step)
        return {
            loading.name: _SHARES_SEEN * (tokens * share // ONE + self._rules.micro_batch_tokens)
            for loading, share in zip(self._loadings, shares, strict=True)
        }

    async def _wait_for(self, need: Need, before: Mapping[str, int]) -> None:
        """Until every source that the step lacks has more than `before` groups brought in, or has ended."""
        missing = {loading: before[loading.name] for loading in self._loadings if loading.name in need.samples}
        tell_s = trio.current_time() + TOLD_AFTER_S
        for loading, added in missing.items():
            if loading.added == added:
                loading.need()
        while True:
            missing = {
                loading: added
                for loading, added in missing.items()
                if loading.added == added and not loading.held.ended
            }
            if not missing:
                return
            with (
                trio.move_on_at(tell_s),
                self._waits.on_sources([one.name for one in missing], self._tasks.held_s),
            ):
                await self._changed.wait()
                self._changed = trio.Event()
                continue
            tell_s = math.inf
            _tell_waiting(missing)


def _tell_waiting(missing: Mapping[SourceLoader, int]) -> None:
    for loading in missing:
        _log.warning(
            "source %s: no step can be planned for %.0f s already; it is still %s. If that never ends, the file system is "
            "stuck, or a function or library hangs on these records",
            loading.name,
            TOLD_AFTER_S,
            loading.doing or "waiting for a worker",
        )
