"""A plan that was changed: when that takes effect, and what a run says whose plan file is edited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from doubles.faulty_store import FaultyStore, ObjectMap
from doubles.trio_clock import TrioClock

from stepfs.cli.commands.status import lake_document
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import create_lake
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer
from stepfs_producer.plan.step import State
from stepfs_producer.run.plan_changes import LOOK_S, say_edits, where_it_begins
from stepfs_producer.run.prepare import LocatedPlan, plan_at

PLAN = """\
version: 1
output: {mesh: "dp=1", micro_batch_tokens: 128}
stages: [{from: 0, sequence_length: 128}]
sources:
  code:  {format: jsonl, files: code/}
  prose: {format: text, records: lines, files: prose.txt}
mix: {code: 30, prose: 70}
"""


async def test_an_edit_is_said_once_and_changes_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(look: Callable[..., str], *of: object, **_: bool) -> str:
        return look(*of)  # this clock does not wait for threads

    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    said: list[str] = []
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    place = plan_at(path)

    async def edited(text: str | None) -> list[str]:
        path.unlink() if text is None else path.write_text(text)
        for _ in range(3):
            await trio.sleep(LOOK_S)
        lines, said[:] = list(said), []
        return lines

    async with trio.open_nursery() as nursery:
        nursery.start_soon(say_edits, place, said.append)
        assert await edited(PLAN) == await edited(PLAN + "# a comment\n") == []
        [line] = await edited(PLAN.replace("30", "35"))
        assert line.startswith(
            f"{path} was edited: mix[0].weights.code: 30 → 35; this run goes on with the plan that it began: "
        )
        assert line.endswith(": stop it and start it again with --accept-changes to take the new one")
        [line] = await edited(PLAN.replace("mix", "mixx"))
        assert "was edited, and is no plan now: " in line
        assert "mixx" in line
        [line] = await edited(None)
        assert "no such file" in line
        assert await edited(PLAN) == [f"{path} is the plan of this run again"]
        path.write_text(PLAN.replace("128", "256").replace("30", "20").replace("70", "80"))
        await trio.sleep(3 * LOOK_S)
        assert "and 1 more; this run" in said[0]
        nursery.cancel_scope.cancel()


async def test_a_plan_without_a_file_is_not_looked_at(tmp_path: Path) -> None:
    await say_edits(LocatedPlan(plan_at(_written(tmp_path)).plan), pytest.fail)


def _written(directory: Path) -> Path:
    path = directory / "plan.yaml"
    path.write_text(PLAN)
    return path


async def test_it_is_said_which_step_is_the_first_and_when_trainers_are_there(autojump_clock: object) -> None:
    shared = ObjectMap()
    store = FaultyStore(shared, actor="run")
    identity = await create_lake(store, slices=1, clock=TrioClock())

    async def told() -> str:
        return await where_it_begins(FaultyStore(shared, actor="other"), identity)

    assert await told() == "the changed plan makes the steps from 0 on"
    async with AsyncProducer("memory://", producer_id="plan", store=store, clock=TrioClock()) as producer:
        for number in range(31):
            await producer.append([b"x"], position=number)
            await producer.flush()
            await trio.sleep(20)
    assert await told() == "the changed plan makes the steps from 31 on"
    await Group.of(store, identity, "eval").add(Step(4))
    await Group.of(store, identity, "run").add(Step(7))
    line = "the changed plan makes the steps from 31 on: group 'run' is at step {}, {} before, about {} min at the pace of the newest 31 steps"
    assert await told() == line.format(7, 24, 8)
    await Group.of(store, identity, "run").paces(Step(25))
    assert await told() == line.format(25, 6, 2)


@pytest.mark.parametrize(
    ("others", "steps", "since", "said"),
    [
        (0, 9, 4, (4, True)),
        (0, 700, 3, (3, True)),  # alone: however many steps that are
        (1, 9, 4, (8, True)),  # the newest steps say it
        (1, 9, None, (None, False)),
        (2, 300, 10, (30, False)),  # no more: at the producer's pace among the others
    ],
)
async def test_status_says_with_which_step_of_the_lake_it_began(
    others: int, steps: int, since: int | None, said: tuple[int | None, bool], autojump_clock: object
) -> None:
    shared = ObjectMap()
    identity = await create_lake(FaultyStore(shared, actor="init"), slices=1, clock=TrioClock())
    async with trio.open_nursery() as nursery:
        producers = []
        for name in ("plan", *(f"other-{number}" for number in range(others))):
            producer = AsyncProducer(
                "memory://", producer_id=name, store=FaultyStore(shared, actor=name), clock=TrioClock(), max_lead=None
            )
            producers.append(await nursery.start(_held_open, producer))
        for step in range(steps):
            for producer in producers:
                changed = since is not None and step >= since
                position = State("ab" * 16, step + 1, {}, since=since if changed else None).position()
                await producer.append([b"x"], position=position)
                await producer.flush()
        log = await LogReader.open(FaultyStore(shared, actor="look"), identity)
        nursery.cancel_scope.cancel()
    found: Any = lake_document(log, {}, [])["producers"]
    plan = found["plan"]["plan"]
    assert plan["since"] == since
    step, exact = said
    assert plan["since_is_exact"] is exact
    assert plan["since_lake_step"] == step if exact or step is None else abs(plan["since_lake_step"] - step) <= 1


async def _held_open(producer: AsyncProducer, *, task_status: trio.TaskStatus[AsyncProducer]) -> None:
    async with producer:
        task_status.started(producer)
        await trio.sleep_forever()
