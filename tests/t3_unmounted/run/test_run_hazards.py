"""Hazards of a running plan, each with a run that has it: P5 samples let go before their step is made, P6 errors that pass.

A mutant must change steps or end the run; the honest run beside it must not.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from random import Random

import pytest
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import StoreUnreachableError
from stepfs_producer.engine.api import WorkerDied
from stepfs_producer.payloads.encode import construct
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import SourceRule
from stepfs_producer.plan.samples import SkipBudget
from stepfs_producer.plan.state import State, read_position
from stepfs_producer.run import sample_buffer, source_loader, step_builder
from stepfs_producer.run.sample_buffer import task_of
from stepfs_producer.sources.block import Block
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.sources.task import BlockTask

MIX = {"code": 30, "prose": 70}
RULES = rules(MIX, micro_batch_tokens=256)
STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, "code", 150)
    write_corpus(directory, "prose", 350)
    return directory


async def steps(engine: HereEngine, corpus, **more) -> list:
    producer = NotedProducer()
    await run(engine, producer, RULES, sources_in(corpus, MIX), steps_max=STEPS, **more)
    return producer.steps


class DyingConstructors(HereEngine):
    """Every step costs two constructors; by then the planner is steps ahead."""

    def __init__(self) -> None:
        super().__init__(1, workers=4)
        self.died: Counter[bytes] = Counter()

    async def submit(self, function, *arguments):
        result = await super().submit(function, *arguments)
        if function is construct and self.died[arguments[1].spans.tobytes()] < 2:
            self.died[arguments[1].spans.tobytes()] += 1
            return WorkerDied("killed")
        return result


async def test_a_step_is_made_again_although_its_samples_were_let_go(corpus) -> None:
    engine = DyingConstructors()
    assert await steps(engine, corpus) == await steps(HereEngine(0, workers=1), corpus)
    assert engine.died.total() == 2 * STEPS


async def test_samples_let_go_before_their_step_is_made_are_noticed(corpus, monkeypatch) -> None:
    """P5: a step in the making looks at what is held by then."""
    honest = task_of

    def late(plan, groups):
        return honest(plan, {name: tuple(of.groups) for name, of in groups.items()})

    monkeypatch.setattr(step_builder, "task_of", late)
    monkeypatch.setattr(sample_buffer.SampleBuffer, "until", lambda self, _cursor: self)
    with pytest.raises(ExceptionGroup):
        await steps(DyingConstructors(), corpus)


class PassingErrors(HereEngine):
    """The file system or the store fails some reads."""

    def __init__(self, seed: int, error: Exception) -> None:
        super().__init__(seed)
        self.error = error
        self.failed = 0
        self._draw = Random(seed)

    async def submit(self, function, *arguments):
        if function in {read_block, sloppy_read} and self._draw.random() < 0.3:
            self.failed += 1
            arguments = (function, arguments, self.error)
            function = failing
        return await super().submit(function, *arguments)


def failing(function, arguments, error: Exception) -> Block:
    if function is sloppy_read:
        return sloppy_read(*arguments, error=error)
    raise error


def sloppy_read(spec: SourceSpec, task: BlockTask, error: Exception | None = None) -> Block:
    """P6: records that cannot be read this time are bad ones."""
    block = read_block(spec, task)
    if error is None:
        return block
    bad = dict.fromkeys(range(len(block.records)), str(error))
    return Block(
        block.place, type(block.records)(**fields(block.records), bad=bad), block.follows, block.ended
    )


def fields(records) -> dict:
    names = ("kind", "data", "ends", "files", "offsets", "dropped", "mask")
    return {name: getattr(records, name) for name in names}


ERRORS = [OSError(5, "Input/output error"), StoreUnreachableError("no answer")]


@pytest.mark.logs("trying on for")
@pytest.mark.parametrize("error", ERRORS, ids=["disk", "store"])
async def test_an_error_that_passes_costs_no_record(corpus, error, patient_clock) -> None:
    engine = PassingErrors(2, error)
    assert await steps(engine, corpus) == await steps(HereEngine(0), corpus)
    assert engine.failed


async def test_a_reader_that_takes_it_for_bad_records_is_noticed(corpus, monkeypatch) -> None:
    monkeypatch.setattr(source_loader, "read_block", sloppy_read)
    budget = SkipBudget(Fraction(1), 10_000)
    lenient = rules(
        MIX,
        micro_batch_tokens=256,
        sources={name: SourceRule("i", "l", skips=budget) for name in MIX},
    )
    engine = PassingErrors(2, ERRORS[0])
    producer = NotedProducer()
    await run(engine, producer, lenient, sources_in(corpus, MIX), steps_max=STEPS)
    assert engine.failed
    assert producer.steps != await steps(HereEngine(0), corpus)


async def test_restarts_at_every_step_do_not_forgive_bad_records(tmp_path) -> None:
    """P8, with real positions: the budget ends the plan at the step at which it ends without a restart."""
    write_corpus(tmp_path, "code", 300, bad=range(0, 300, 9))
    chosen = rules(
        {"code": 1},
        micro_batch_tokens=256,
        sources={"code": SourceRule("i", "l", skips=SkipBudget(Fraction(1, 100), 5))},
    )
    sources = sources_in(tmp_path, {"code": 1}, epochs=1)
    whole = NotedProducer()
    with pytest.raises(ExceptionGroup):
        await run(HereEngine(1), whole, chosen, sources)
    parted = NotedProducer()
    state: State = Planner(chosen).begin()
    with pytest.raises(ExceptionGroup):
        while True:
            position = parted.steps[-1][1] if parted.steps else None
            await run(HereEngine(2), parted, chosen, sources, position=position, steps_max=state.step + 1)
            state = read_position(parted.steps[-1][1])
    assert parted.steps[: len(whole.steps)] == whole.steps
    assert 1 <= state.sources["code"].skipped <= 10
