"""Fetch ahead the slices that this node will open next: learned from opens, announced, or given by `--ranks`.

A task of its own, because the index segment of a step may have to be read first.
"""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import trio

from stepfs.data import access_pattern
from stepfs.data.announced_orders import Hint, HintedStreams, OrderState
from stepfs.data.fetch import PrefetchRequest
from stepfs.data.memory_cache import ReadingOrder
from stepfs.data.slices import Slices
from stepfs.data.tuning import TUNING
from stepfs.errors import CorruptError, NewerFormatError, StepfsError
from stepfs.format.ids import SEGMENT_STEPS, SliceIndex, Step
from stepfs.lake.log.reader import LogReader
from stepfs.view.tree import Tree

_log = logging.getLogger("stepfs.data")


@dataclass(frozen=True, slots=True)
class ReadersState:
    """What the next daemon of a mount goes on from, in values of JSON; it only warms."""

    pace: list[float] = field(default_factory=list)  # seconds since the opens of new steps
    opened: list[list[int]] = field(default_factory=list)  # steps, each with the slices opened of it; the newest last
    went_on: list[bool] = field(default_factory=list)
    recent: list[int] = field(default_factory=list)
    near: dict[str, list[list[int]]] = field(default_factory=dict)  # of `HintedStreams.near`


class Prefetcher:
    """Turns opens into prefetch requests."""

    def __init__(
        self,
        slices: Slices,
        tree: Tree,
        log: LogReader,
        *,
        window: int | None = None,
        hinted: Collection[SliceIndex] = (),
        start: Step | None = None,
        guesses: bool = True,
        processor_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`window`: steps ahead, fixed (0: none); None adapts. `hinted`: slices this node reads (`--ranks`). `start`:
        where reading will begin, fetched before the first open; default the first visible step. `guesses`: whether opens
        that were not announced predict the next ones; not so in one of several processes that take turns. `processor_s`:
        the processor time that this thread has used; with less of it for a plan, the next one may begin sooner.
        """
        self.window = TUNING.window_min if window is None else window  # in use now
        self.position = access_pattern.AccessHistory()
        self.hints = HintedStreams()
        self._pace = access_pattern.StepRate()
        self._slices = slices
        self._tree = tree
        self._log = log
        self._fixed = window is not None
        self._hinted = frozenset(hinted)
        self._start = start
        self._guesses = guesses
        self._processor_s = processor_s
        # Steps opened since a plan found no order; None: the last one found one.
        self._jumps: int | None = None
        self._alone: set[Step] = set()  # announced ones in the newest plan
        self._learned = set(self._hinted)
        self._learned_at = float("-inf")
        self._rest: dict[int, float] = {}  # segments that are damaged → when to look at them again
        self._wake = trio.Event()
        self._wanted = Step(0)  # one past the greatest step that was opened, or is planned

    def note_open(self, step: Step, index: SliceIndex) -> None:
        """A reader opened this file. Never waits."""
        self._wanted = max(self._wanted, Step(step + 1))
        fresh = self.hints.note_open(step, index, trio.current_time())
        if fresh is None:  # not announced: is there an order all the same?
            fresh = self._guesses and self.position.note(step, index)
            if self._is_jump(fresh):
                return
        if fresh:
            self._pace.note(trio.current_time())
        if index not in self._learned:
            self._learned.add(index)
            self._learned_at = trio.current_time()
        self._rest.pop(step // SEGMENT_STEPS, None)
        self._wake.set()

    def _is_jump(self, fresh: bool) -> bool:
        """Whether readers were out of order at the last plan, and still are: each eighth such open is planned for."""
        if self._jumps is None or self.position.order.goes_on:
            return False
        self._jumps += fresh
        return self._jumps < TUNING.jumps_unplanned

    def ahead_s(self) -> float:
        """How long the readers can go on with the steps that are known, those of the newest plan not counted."""
        spare = self._tree.next_step - self._wanted
        if spare <= 0:
            return 0.0
        pace = self._pace.steps_per_s()
        return spare / pace if pace else float("inf")

    def accept(self, hint: Hint) -> None:
        """Accept a trainer's hint about its next opens; `UsageError` for an invalid one."""
        self.hints.accept(hint, trio.current_time())
        self._wake.set()

    def note_frontier(self) -> None:
        """Steps were committed or reclaimed."""
        self._wake.set()

    def state(self) -> ReadersState:
        """What is known of the readers, for the next daemon of the mount."""
        pace, (went_on, recent) = self._pace.state(trio.current_time()), self.position.order.state()
        return ReadersState(pace, self.position.state(), went_on, recent, self.hints.near())

    def inherit(self, state: ReadersState, orders: Mapping[str, OrderState]) -> None:
        """Before `run`: go on as the daemon before would have. `orders`: what `HintedStreams.decide` was given, by name."""
        now = trio.current_time()
        self.hints.inherit(orders, state.near, now)
        self._pace.inherit(state.pace, now)
        self.position.inherit(state.opened)
        self.position.order.inherit(state.went_on, state.recent)
        self._learned.update(*map(self.position.opened, map(Step, (step for step, *_ in filter(None, state.opened)))))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        cost_s = 0.0
        while True:
            await trio.sleep(max(TUNING.gather_s, cost_s / TUNING.planning_share))
            await self._until_settled()
            self._wake = trio.Event()
            began = self._processor_s()  # waiting costs the loop nothing
            plan = self._plan()
            self._wanted = max((Step(step + 1) for step, _ in plan), default=self._wanted)
            self._jumps = None if plan else 0
            retry = not await self._grant(plan)
            cost_s = self._processor_s() - began
            with trio.move_on_after(TUNING.index_retry_s if retry else float("inf")):
                await self._wake.wait()

    async def _until_settled(self) -> None:
        """Wait while slices are still being learned: plans for a part of them would cost a GET per rank."""
        with trio.move_on_after(TUNING.settle_max_s):
            while (wait := self._learned_at + TUNING.settle_s - trio.current_time()) > 0:  # noqa: ASYNC110 -- for quiet
                await trio.sleep(wait)

    def _plan(self) -> access_pattern.Plan:
        first, frontier = self._tree.first_visible(), self._tree.last_visible()
        self.position.forget_below(first)
        if self._fixed and not self.window:
            return []
        opened = self.position.runs()
        runs = access_pattern.ordered_runs(opened, self.position.order, first=first, frontier=frontier)
        learned = sum(len(self._hinted or run.indices) for run in runs)
        hinted = self.hints.plan(
            hinted=self._hinted,
            window_of=lambda announced: self._affordable(learned + announced),
            first=first,
            frontier=frontier,
            now=trio.current_time(),
        )
        self._alone = {step for step, _ in hinted}
        if not opened and not hinted and not self.hints.ended(trio.current_time()):
            start = first if self._start is None else max(first, self._start)
            plan = access_pattern.plan_start(self._hinted, window=self.window, first=start, frontier=frontier)
            return self._ordered(plan, low=first)
        if not hinted:
            self._affordable(learned)
        plan = access_pattern.plan_ahead(
            runs,
            self.position.opened,
            hinted=self._hinted,
            window=self.window,
            first=first,
            frontier=frontier,
            fixed=self._fixed,
        )
        low = min((step for step, _ in plan), default=opened[0].low if opened else first)
        whole = hinted + [prefetch for prefetch in plan if prefetch[0] not in self._alone]
        return self._ordered(
            whole, low=first if hinted else low, announced=bool(hinted)
        )  # of announced steps none is passed over

    def _ordered(self, plan: access_pattern.Plan, *, low: Step, announced: bool = False) -> access_pattern.Plan:
        self._slices.set_order(ReadingOrder((step for step, _ in plan), low=low, announced=announced))
        return plan

    def _affordable(self, slices: int) -> int:
        """The window from now on, for so many slices a step."""
        if not self._fixed:
            self.window = access_pattern.window_steps(
                pace=self._pace.steps_per_s(),
                latency_s=self._slices.latency_s,
                step_bytes=slices * self._slices.slice_bytes,
                budget_bytes=int(TUNING.ahead_share * self._slices.capacity_bytes),
            )
        return self.window

    async def _grant(self, plan: access_pattern.Plan) -> bool:
        """Request the steps whose entries are in memory; load the index of the others meanwhile. False: try later."""
        prefetch_requests: list[PrefetchRequest] = []
        missing: set[int] = set()  # segments; an open of a file in them gets the error
        behind = await self._load_alone(plan)
        for step, indices in plan:
            entry = self._log.entry_if_loaded(step)
            segment = step // SEGMENT_STEPS
            rested = trio.current_time() >= self._rest.get(segment, float("-inf"))
            if entry is None and segment not in missing and rested and step not in self._alone:
                self._slices.request(prefetch_requests)
                try:
                    entry = await self._log.entry(step)
                except StepfsError as error:
                    _log.info("step %d is not fetched ahead: %s", step, error)
                    if isinstance(error, (CorruptError, NewerFormatError)):  # as it will be next time
                        self._rest[segment] = trio.current_time() + TUNING.index_rest_s
                    else:
                        missing.add(segment)
            if entry is None:
                continue
            slices = entry.tgb.slices
            prefetch_requests.append((entry, [index for index in indices if index < slices]))
        self._slices.request(prefetch_requests)
        return not missing and not behind

    async def _load_alone(self, plan: access_pattern.Plan) -> bool:
        """The index of announced steps, which lie anywhere: several at a time. True if some cannot be read now."""
        table = self._log
        # Of the nearest alone: more than are kept would displace each other, and be read for ever.
        near = itertools.islice((step for step, _ in plan if step in self._alone), table.lone_entries_max * 3 // 4)
        unknown = [step for step in near if table.entry_if_loaded(step) is None]
        if not unknown:
            return False
        known = ((table.entry_if_loaded(step), indices) for step, indices in plan)
        self._slices.request([(entry, indices) for entry, indices in known if entry is not None])
        failed = False

        async def load(steps: Iterator[Step]) -> None:
            nonlocal failed
            for step in steps:
                try:
                    await table.lone_entry(step)
                except StepfsError as error:
                    _log.info("step %d is not fetched ahead: %s", step, error)
                    failed = True

        async with trio.open_nursery() as nursery:
            steps = iter(unknown[: TUNING.entries_max])
            for _ in range(TUNING.entries_at_once):
                nursery.start_soon(load, steps)
        if len(unknown) > TUNING.entries_max and not failed:
            self._wake.set()  # plan again: readers may have moved
        return failed
