"""One side of a comparison in a process of its own: a whole plan by `stepfs-produce run`'s parts, or by a plain Pool.

Both sides plan with the same planner, so they make the same payloads; the side without a lake throws them away. The
clock runs from warm workers to the last payload (committed, on the side with a lake).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

import trio

from bench.machine import cpu_s, family
from stepfs.format.ids import Epoch
from stepfs.store.api import StoreOptions
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.retry import KeptBody
from stepfs_producer.engine.worker import preload
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import SampleGroup, gathered
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.samples import BlockHead
from stepfs_producer.plan.step import End, Need, State
from stepfs_producer.run.lake import ensure_lake
from stepfs_producer.run.load import LoadedSource, SampleBuffer, SampleChunk, spans_of
from stepfs_producer.run.memory import memory_of
from stepfs_producer.run.pipeline import Pipeline, RunCallbacks, RunConfig, StepSink
from stepfs_producer.run.prepare import PreparedPlan, grid_of, looked_up, plan_at
from stepfs_producer.run.workers.tasks import GroupHead, read, transform
from stepfs_producer.run.workers.upload import Destination, put_step
from stepfs_producer.sources.record import BlockTask, SourceSpec
from stepfs_producer.transforms.documents import TransformSpec

BLOCKS_AHEAD = 3  # of each source, in the Pool
STEPS_AHEAD = 4
WARM_S = 60.0

Used = dict[str, float]


class Clock:
    """Seconds of the clock, and of CPU: of this process and of its workers, which are up already."""

    def __init__(self) -> None:
        self._began = self._now()

    def read(self) -> Used:
        """Since it was made."""
        return {name: value - self._began[name] for name, value in self._now().items()}

    def _now(self) -> Used:
        return {"seconds": time.perf_counter(), "cpu_s": sum(cpu_s(pid) for pid in family(os.getpid()))}


async def with_lake(plan: Path, lake: str, workers: int) -> tuple[Used, State]:
    """What it took, and the state behind the last step."""
    place = plan_at(plan)
    store = open_store(lake)
    try:
        identity = await ensure_lake(store, grid_of(place.plan), place.plan.output.ext)
        fit = await looked_up(place)
        memory = memory_of(None, fit.rules, fit.sources, workers)
        last: list[State] = []
        running = RunConfig(fit.rules, fit.sources, fit.payloads, held_bytes_max=memory.held_bytes)
        async with (
            AsyncProducer(
                lake,
                producer_id="plan",
                store=store,
                max_lead_without_groups=False,
                max_pending_bytes=memory.pending_bytes,
            ) as producer,
            local_engine(workers, preload=partial(preload, str(plan.parent))) as engine,
        ):
            with trio.fail_after(WARM_S):
                while engine.idle < workers + engine.spares:  # noqa: ASYNC110 - the engine has no event for it
                    await trio.sleep(0.05)
            to = Destination(lake, StoreOptions(), identity, producer.producer_id, Epoch(producer.epoch))
            sink = StepSink(producer, put_step, to)
            pipeline = Pipeline(running, engine, sink, RunCallbacks(appended=lambda made, *_: last.append(made.after)))
            clock = Clock()
            await pipeline.run(Planner(fit.rules).begin())
            return clock.read(), last[-1]
    finally:
        await store.aclose()


Loaded = tuple[BlockHead, GroupHead, SampleGroup]


def load(spec: SourceSpec, how: TransformSpec, task: BlockTask) -> Loaded:
    """In the Pool: a block, read and transformed."""
    block, records = read(spec, task)
    return block, *transform(how, spec.seed, block.place.epoch, spec.name, records, 0, block.records)


@dataclass(frozen=True)
class _Here:
    """A body that came back by value."""

    samples: SampleGroup
    nbytes: int = 0


async def _never() -> _Here:
    raise AssertionError("it is here")


class _Source:
    """Blocks of one source in the Pool, ahead of use. They are whole fragments, so the next one is known at once."""

    def __init__(self, pool: Pool, source: LoadedSource) -> None:
        self.held = SampleBuffer()
        self._pool = pool
        self._source = source
        self._next: BlockTask | None = source.layout.task(BlockAddress(0, 0, 0))
        self._waiting: deque[AsyncResult[Loaded]] = deque()
        self._submit()

    def more(self) -> None:
        """One more block."""
        block, head, samples = self._waiting.popleft().get()
        body = KeptBody(_Here(samples), _never, lambda _: None)
        self.held.add(SampleChunk(block, 0, head.heads, body))
        self.held.ended = block.ended
        self._submit()

    def _submit(self) -> None:
        while self._next is not None and len(self._waiting) < BLOCKS_AHEAD:
            assert not self._next.cut
            arguments = (self._source.spec, self._source.transform, self._next)
            self._waiting.append(self._pool.apply_async(load, arguments))
            self._next = self._source.layout.task(self._next.next_fragment)


def without_lake(fit: PreparedPlan, pool: Pool) -> tuple[Used, State]:
    """What it took, and the state behind the last step."""
    clock = Clock()
    planner = Planner(fit.rules)
    state = planner.begin()
    sources = {source.spec.name: _Source(pool, source) for source in fit.sources}
    making: deque[AsyncResult[Any]] = deque()
    while not isinstance(
        planned := planner.next(state, {name: one.held.ahead(sys.maxsize)[0] for name, one in sources.items()}),
        End,
    ):
        if isinstance(planned, Need):
            for name in planned.samples:
                sources[name].more()
            continue
        spans, bodies = spans_of(planned, {name: tuple(one.held.groups) for name, one in sources.items()})
        samples = [body.reference.samples for body in bodies if isinstance(body.reference, _Here)]
        making.append(pool.apply_async(construct, (fit.payloads, gathered(spans, samples))))
        if len(making) > STEPS_AHEAD:
            making.popleft().get()
        state = planned.after
        for name, one in sources.items():
            one.held.forget_before(state.sources[name])
    while making:
        making.popleft().get()
    return clock.read(), state


def main(order: dict[str, Any]) -> dict[str, Any]:
    plan, workers = Path(order["plan"]), order["workers"]
    if order["side"] == "lake":
        used, state = trio.run(with_lake, plan, order["lake"], workers)
    else:
        place = plan_at(plan)
        fit = trio.run(looked_up, place)
        with multiprocessing.Pool(workers, preload, [str(plan.parent)]) as pool:
            pool.map(time.sleep, [0.5] * workers, 1)  # all of them are up
            used, state = without_lake(fit, pool)
    return used | {"position": state.position(), "tokens": sum(one.tokens for one in state.sources.values())}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
