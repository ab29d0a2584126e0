"""A run of a plan: the steps do not depend on who worked when, and every record is in exactly one of them."""

from __future__ import annotations

import io
import re
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import RefusedError, StepfsError
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Exhausted, Packing, SourceRule
from stepfs_producer.plan.samples import SkipBudget
from stepfs_producer.run import source_loader
from stepfs_producer.run.conductor import Conductor, EndReason, RunCallbacks, RunConfig

MIX = {"code": 30, "prose": 70}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, "code", 150)
    write_corpus(directory, "prose", 350)
    return directory


async def steps(engine: HereEngine, corpus, chosen, *, steps_max=12, position=None):
    producer = NotedProducer()
    await run(engine, producer, chosen, sources_in(corpus, MIX), steps_max=steps_max, position=position)
    assert producer.flushed == len(producer.steps)
    return producer.steps


@pytest.mark.parametrize("packing", Packing)
async def test_steps_are_the_same_whoever_worked_when(corpus, packing, monkeypatch) -> None:
    chosen = rules(MIX, packing=packing, micro_batch_tokens=256)
    expected = await steps(HereEngine(0, workers=1), corpus, chosen)
    assert len(expected) == 12
    for seed in range(1, 6):
        monkeypatch.setattr(source_loader, "GROUP_RECORDS_MIN", seed * 5)
        assert await steps(HereEngine(seed, workers=seed, deaths=0.1), corpus, chosen) == expected


async def test_a_run_continues_from_any_position(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    for done in (1, 5, 11):
        again = await steps(HereEngine(done), corpus, chosen, position=expected[done - 1][1])
        assert again == expected[done:]


async def test_every_record_is_in_exactly_one_step(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=512, length=512, exhausted=Exhausted.ALL, pad_last=True)
    producer = NotedProducer()
    conductor, ending = await run(HereEngine(3), producer, chosen, sources_in(corpus, MIX, epochs=1))
    assert ending is EndReason.COMPLETE
    assert "exhausted" in conductor.reason
    found: Counter[str] = Counter()
    for payloads, _, _ in producer.steps:
        for payload in payloads:
            ids = np.load(io.BytesIO(payload))[0]
            text = "".join(chr(one) if one < 256 else "\n" for one in ids.reshape(-1).tolist())
            found.update(re.findall(r"(\w+ \d+) x*\n", text))
    assert found == Counter(
        f"{name} {number}" for name, count in (("code", 150), ("prose", 350)) for number in range(count)
    )


async def test_a_stop_ends_between_two_steps(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    producer = NotedProducer()
    engine = HereEngine(4)

    def appended(plan, _seconds, _held) -> None:
        if plan.step == 4:
            stop()

    running = RunConfig(chosen, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258))
    conductor = Conductor(running, engine, producer, RunCallbacks(appended=appended))
    stop = conductor.stop
    assert await conductor.run(Planner(chosen).begin()) is EndReason.STOPPED
    assert 5 <= len(producer.steps) == producer.flushed
    assert producer.steps == expected[: len(producer.steps)]


async def test_bad_records_are_told_and_counted(tmp_path) -> None:
    write_corpus(tmp_path, "code", 40, bad=(3, 30))
    told = []
    chosen = rules(
        {"code": 1},
        micro_batch_tokens=512,
        length=512,
        pad_last=True,
        sources={"code": SourceRule("i", "l", skips=SkipBudget(Fraction(1, 10), 5))},
    )
    producer = NotedProducer()
    await run(
        HereEngine(1),
        producer,
        chosen,
        sources_in(tmp_path, {"code": 1}, epochs=1),
        watching=RunCallbacks(skipped=lambda *one: told.append(one)),
    )
    assert [(source, file) for source, file, _, _ in sorted(told)] == [("code", 0), ("code", 1)]
    assert all(reason for *_, reason in told)


async def test_the_first_bad_record_stops_a_plan_that_allows_none(tmp_path) -> None:
    write_corpus(tmp_path, "code", 40, bad=(3,))
    chosen = rules({"code": 1}, micro_batch_tokens=512, length=512)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1), NotedProducer(), chosen, sources_in(tmp_path, {"code": 1}, epochs=1))
    assert caught.group_contains(RefusedError, match="could not be decoded")


async def test_a_task_that_kills_three_workers_stops_the_run(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1, deaths=1.0), NotedProducer(), chosen, sources_in(corpus, MIX))
    assert caught.group_contains(StepfsError, match="workers died of it")


@pytest.mark.timeout(20)
async def test_a_source_that_gives_nothing_for_a_whole_epoch_ends_the_run(tmp_path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.jsonl").write_text('{"text": ""}\n' * 40)
    chosen = rules({"code": 1}, micro_batch_tokens=512, length=512)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1), NotedProducer(), chosen, sources_in(tmp_path, {"code": 1}))
    assert caught.group_contains(RefusedError, match="a whole epoch of it gave no sample")
