"""The pipeline of a run: order, late tasks, and machines that come and go."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from importlib import metadata
from random import Random
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from declared import changed, tokenizer_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError, UsageError
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.keys import data_prefix, parse_data_key
from stepfs.format.planned import Listing
from stepfs.lake.identity import create_lake, open_lake
from stepfs.store.opening import open_store
from stepfs_producer.backoff import Backoff, Outage
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine import retry as failover
from stepfs_producer.engine.api import WorkerDied
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.retry import LATE_S_MIN, LATE_TIMES_MEAN, MachinesLostError, TaskRunner, WorkersDiedError
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Exhausted, Packing, SourceRule
from stepfs_producer.plan.sources import Jsonl, Parquet, SkipBudget, SourceFiles, Table
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run import machines, pipeline, read_ahead
from stepfs_producer.run.autoscale import WorkersWanted
from stepfs_producer.run.machines import node_check
from stepfs_producer.run.memory import STEPS_PER_WORKER
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.pipeline import EndReason, RunCallbacks

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


class ResizedEngine(HereEngine):
    """Notes how many workers it was told to have."""

    def __init__(self, seed: int) -> None:
        self.told: set[object] = set()
        super().__init__(seed, deaths=0.1)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "workers":
            self.told.add(value)


async def test_a_number_of_workers_that_changes_does_not_show(corpus, monkeypatch) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0, workers=1), corpus, chosen)
    draw = Random(7)
    monkeypatch.setattr(pipeline, "LOOK_EVERY_S", 1e-6)
    monkeypatch.setattr(WorkersWanted, "next", lambda *_: draw.randint(1, 6))
    engine, producer = ResizedEngine(1), NotedProducer()
    sources = sources_in(corpus, MIX)
    await run(engine, producer, chosen, sources, steps_max=12, workers_max=6)
    assert producer.steps == expected
    assert engine.told == set(range(1, 7))


@cache
def steps_of_one(corpus, packing):
    chosen = rules(MIX, packing=packing, micro_batch_tokens=256)
    return trio.run(steps, HereEngine(0, workers=1), corpus, chosen)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([0, 0.02, 0.2]),
    st.sampled_from(Packing),
)
def test_marks_groups_late_answers_and_lost_bodies_do_not_show(corpus, seed, workers, spares, losses, packing) -> None:
    """P2: each is drawn anew at every chance, and with spares every task that has not answered at once is late."""
    draw = Random(seed)
    chosen = rules(MIX, packing=packing, micro_batch_tokens=256)
    expected = steps_of_one(corpus, packing)
    engine = HereEngine(seed, workers=workers, deaths=0.1, losses=losses)
    engine.spares = max(spares, 1)

    def any_marks(coming, _works, most):
        return [(draw.choice([1, tokens, 9 * tokens + 1]), draw.randint(1, most + 1)) for tokens in coming]

    def any_group(self, *_measured) -> None:
        self.group_records = draw.choice([1, 2, 3, 7, 40])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "marks_of", any_marks)
        patch.setattr(read_ahead.Work, "note", any_group)
        if spares:
            patch.setattr(failover, "LATE_S_MIN", 0)
            patch.setattr(failover, "LATE_TIMES_MEAN", 0)
        assert trio.run(steps, engine, corpus, chosen) == expected
    assert bool(engine.replaced) == bool(spares), "tasks were late, and one of two workers came second"
    assert losses < 0.2 or engine.lost


async def test_processes_of_this_machine_that_are_killed_make_the_same_steps(corpus) -> None:
    """P2: any engine; Ray's is compared in `t5_cli/test_ray.py`."""
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0, workers=1), corpus, chosen)
    async with local_engine(2) as engine, trio.open_nursery() as nursery:

        async def kill() -> None:
            while not engine.died:  # an idle one is replaced, and not counted
                pid = await engine.submit(os.getpid)
                assert isinstance(pid, int)
                os.kill(pid, signal.SIGKILL)
                await engine.submit(os.getpid)

        nursery.start_soon(kill)
        while not engine.died:  # a run may be over before the first kill
            assert await steps(engine, corpus, chosen) == expected
        nursery.cancel_scope.cancel()


async def test_a_run_continues_from_any_position(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    for done in (1, 5, 11):
        again = await steps(HereEngine(done), corpus, chosen, position=expected[done - 1][1])
        assert again == expected[done:]


async def test_every_record_is_in_exactly_one_step(corpus) -> None:
    chosen = rules(MIX, micro_batch_tokens=512, length=512, exhausted=Exhausted.ALL, pad_last=True)
    producer = NotedProducer()
    engine = HereEngine(3, deaths=0.1, losses=0.1)
    pipeline, ending = await run(engine, producer, chosen, sources_in(corpus, MIX, epochs=1))
    assert ending is EndReason.COMPLETE
    assert not engine.kept, "all is let go when its last step is made"
    assert "exhausted" in pipeline.reason
    found: Counter[str] = Counter()
    for payloads, _, _ in producer.steps:
        for payload in payloads:
            ids = np.load(io.BytesIO(payload))[0]
            text = "".join(chr(one) if one < 256 else "\n" for one in ids.reshape(-1).tolist())
            found.update(re.findall(r"(\w+ \d+) x*\n", text))
    assert found == Counter(
        f"{name} {number}" for name, count in (("code", 150), ("prose", 350)) for number in range(count)
    )


class FullLake(NotedProducer):
    """Gives no ticket before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.takes = trio.Event()

    async def reserve(self, **more) -> Ticket:
        await self.takes.wait()
        return await super().reserve(**more)


async def test_the_next_step_is_planned_while_there_is_no_room_for_it(corpus, patient_clock, monkeypatch):
    workers, planned = 1, []
    honest = Planner.next

    def noted(self, state, ahead):
        found = honest(self, state, ahead)
        planned.extend([state.step] if isinstance(found, StepPlan) else [])
        return found

    monkeypatch.setattr(Planner, "next", noted)
    chosen = rules(MIX, micro_batch_tokens=256)
    expected = await steps(HereEngine(0), corpus, chosen)
    planned.clear()
    lake = FullLake()
    async with trio.open_nursery() as nursery:
        engine = HereEngine(0, workers=workers)
        nursery.start_soon(partial(run, engine, lake, chosen, sources_in(corpus, MIX), steps_max=12))
        await trio.sleep(1)  # of the test's clock: nothing moves any more
        assert planned == list(range(STEPS_PER_WORKER * workers + 1))
        lake.takes.set()
    assert lake.steps == expected


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
        HereEngine(1), producer, chosen, sources_in(tmp_path, {"code": 1}, epochs=1),
        watching=RunCallbacks(skipped=lambda *one: told.append(one)),
    )  # fmt: skip
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


HANGS = float("inf")


def work() -> str:
    return "done"


class TimedEngine:
    """The n-th submission takes the n-th number of seconds, and answers with its number, or what `answers` says."""

    def __init__(self, seconds: Sequence[float], *, workers: int = 1, spares: int = 1, answers=None) -> None:
        self.seconds, self.workers, self.spares = list(seconds), workers, spares
        self.answers = answers or {}
        self.began: list[float] = []
        self.asked_at: list[int] = []
        self.ended: list[int] = []
        self.replaced = 0
        self.busiest = self._busy = 0

    async def submit(self, _function: Callable[..., object], *_arguments: object) -> object:
        number = len(self.began)
        self.began.append(trio.current_time())
        self._busy += 1
        self.busiest = max(self.busiest, self._busy)
        try:
            await trio.sleep(self.seconds[number])
        except trio.Cancelled:
            self.ended.append(number)
            raise
        finally:
            self._busy -= 1
        answer = self.answers.get(number, number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def up(self) -> None:
        await trio.lowlevel.checkpoint()

    def warm_spare(self) -> None:
        self.replaced += 1

    async def end_stalled(self) -> None:
        self.asked_at.append(len(self.began))
        await trio.lowlevel.checkpoint()


def since(began_s: float) -> float:
    return round(trio.current_time() - began_s, 6)


@pytest.mark.parametrize(
    ("seconds", "answer", "took_s", "ended", "busiest"),
    [
        ([HANGS, 1], 1, LATE_S_MIN + 1, [0], 2),
        ([7, HANGS], 0, 7, [1], 2),
        ([HANGS, HANGS, HANGS, 1], 3, LATE_S_MIN * (1 + 2 + 4) + 1, [1, 2, 0], 2),
        # Never begun anew: each of the others had twice the time of the one before.
        ([1000] * 20, 0, 1000, [1, 2, 3, 4, 5, 6, 7], 2),
    ],
    ids=["another worker does it", "the first may still win", "a spare hangs as well", "a long task"],
)
async def test_the_first_answer_counts_and_every_other_try_ends(
    autojump_clock, seconds, answer, took_s, ended, busiest
) -> None:
    engine = TimedEngine(seconds)
    tasks = TaskRunner(engine, 600)
    began_s = trio.current_time()
    assert await tasks.carry_out("it", "code", work) == answer
    assert since(began_s) == took_s
    assert (engine.ended, engine.replaced, engine.busiest) == (ended, len(ended), busiest)
    assert (tasks.late, len(engine.began)) == (1, len(ended) + 1)


@pytest.mark.logs("no space|away")
async def test_the_steps_and_the_commit_of_a_run_tell_one_outage_and_each_source_its_own(caplog, autojump_clock):
    outage = Outage()
    full, away = StoreUnreachableError("no space"), OSError("away")
    engine = TimedEngine([1] * 8, workers=4, answers={0: full, 1: full, 2: away, 3: away})
    tasks, commit = TaskRunner(engine, 600, outage), Backoff("commit", 600, outage)
    await commit.failed(full)
    async with trio.open_nursery() as nursery:
        for source in ("", "", "code", "code"):
            nursery.start_soon(tasks.carry_out, "it", source, work)
            await trio.testing.wait_all_tasks_blocked()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"{what}; trying on for 600 s" for what in ("commit: no space", "it: it: away")]


async def test_late_is_ten_times_the_mean_of_its_kind_and_source(autojump_clock) -> None:
    engine = TimedEngine([2, HANGS, 1, HANGS, 1])
    tasks = TaskRunner(engine, 600)
    await tasks.carry_out("it", "code", work)
    for source, late_s in (("code", 2 * LATE_TIMES_MEAN), ("prose", LATE_S_MIN)):
        began_s = trio.current_time()
        await tasks.carry_out("it", source, work)
        assert since(began_s) == late_s + 1


async def test_waiting_for_a_worker_is_not_late(autojump_clock) -> None:
    engine = TimedEngine([4] * 6)
    tasks = TaskRunner(engine, 600)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(tasks.carry_out, "it", "code", work)
    assert (len(engine.began), tasks.late, engine.busiest) == (6, 0, 1)


async def test_second_tries_are_at_most_as_many_as_spares(autojump_clock) -> None:
    engine = TimedEngine([HANGS] * 4 + [9] * 4, workers=4, spares=2)
    tasks = TaskRunner(engine, 600)
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(tasks.carry_out, "it", "code", work)
    assert engine.busiest == 6
    assert since(began_s) == LATE_S_MIN + 18
    assert sorted(engine.ended) == [0, 1, 2, 3]


@pytest.mark.parametrize("seconds", [(6, 3), (9, 2)], ids=["the first dies", "the second dies"])
async def test_a_death_beside_another_try_costs_nothing(autojump_clock, seconds) -> None:
    first_dies = LATE_S_MIN + seconds[1] > seconds[0]
    dying = 0 if first_dies else 1
    engine = TimedEngine(seconds, answers={dying: WorkerDied("killed")})
    assert await TaskRunner(engine, 600).carry_out("it", "code", work) == 1 - dying
    assert (len(engine.began), engine.ended, engine.replaced) == (2, [], 0)


async def test_when_both_die_it_is_one_death_of_the_task(autojump_clock) -> None:
    died = {number: WorkerDied("killed") for number in range(4)}
    engine = TimedEngine([6, 3, 6, 3, 1], answers=died)
    assert await TaskRunner(engine, 600).carry_out("it", "code", work) == 4


@pytest.mark.parametrize(
    ("deaths", "ended_by"), [
        ("mmmmmmm", None), ("mmmwmmwm", None), ("mmwmmwmw", WorkersDiedError), ("mmmmwmwmmm", MachinesLostError),
    ],
)  # fmt: skip
async def test_a_lost_machine_is_not_charged_as_a_worker(autojump_clock, deaths: str, ended_by) -> None:
    """w: a worker died; m: its machine was lost."""
    died = {number: WorkerDied("killed", with_machine=one == "m") for number, one in enumerate(deaths)}
    engine = TimedEngine([1] * (len(deaths) + 1), answers=died)
    task = TaskRunner(engine, 600).carry_out("it", "code", work)
    if ended_by is None:
        assert await task == len(deaths)
    else:
        with pytest.raises(ended_by, match=r"^it: \d (workers|machines) .*\(killed\)"):
            await task
        assert len(engine.began) == len(deaths)


async def test_an_error_is_an_answer(autojump_clock) -> None:
    engine = TimedEngine([HANGS, 1], answers={1: UsageError("no such function")})
    with pytest.raises(UsageError, match="no such function"):
        await TaskRunner(engine, 600).carry_out("it", "code", work)
    assert engine.ended == [0]


async def test_a_run_that_ends_ends_both_tries(autojump_clock) -> None:
    engine = TimedEngine([HANGS, HANGS])
    with trio.move_on_after(2 * LATE_S_MIN):
        await TaskRunner(engine, 600).carry_out("it", "code", work)
    assert sorted(engine.ended) == [0, 1]
    assert engine.replaced == 0


async def test_idle_workers_have_to_answer_before_a_second_try(autojump_clock) -> None:
    """A spare that stands still since its last task would cost twice the patience: 15 s in all."""
    engine = TimedEngine([HANGS, HANGS, 1.0])
    assert await TaskRunner(engine, 600).carry_out("task", "", work) == 2
    assert engine.asked_at == [1, 2]


TWO_SOURCES = {"code": 1, "prose": 1}


@pytest.fixture
def lake(tmp_path) -> RunOptions:
    url = f"file://{tmp_path}/lake"

    async def create() -> None:
        store = open_store(url)
        await create_lake(store, slices=Grid(2, 1), ext=".npy")
        await store.aclose()

    trio.run(create)
    return RunOptions(url)


@pytest.fixture
def sources(tmp_path):
    for name in TWO_SOURCES:
        write_corpus(tmp_path, name, 20)
    return sources_in(tmp_path, TWO_SOURCES)


def identity_of(options: RunOptions) -> LakeIdentity:
    async def read() -> LakeIdentity:
        store = open_store(options.lake)
        found = await open_lake(store)
        await store.aclose()
        return found

    return trio.run(read)


def lacks(sources, options: RunOptions, identity: LakeIdentity | None = None) -> list[str]:
    """As another machine finds it, to which it travels."""
    look = node_check(sources, identity or identity_of(options), options)
    return pickle.loads(pickle.dumps(look))()


def test_other_versions_are_named(sources, lake, monkeypatch) -> None:
    look = node_check(sources, replace(identity_of(lake), ext=".pt"), lake)
    installed = metadata.version

    def version(name: str) -> str:
        if name in {"torch", "pillow"}:  # which no source here needs
            raise metadata.PackageNotFoundError
        return "0.9" if name == "numpy" else installed(name)

    monkeypatch.setattr("stepfs_producer.run.lake.version", version)
    assert look() == [
        f"has numpy 0.9, the command {installed('numpy')}; install the same",
        f"has torch not, the command {installed('torch')}; install the same",
    ]


USED: list[tuple[str, SourceFiles, dict[str, Any]]] = [
    ("", Jsonl("x"), {}), ("tokenizers", Jsonl("x"), {"tokenizer": tokenizer_spec("x.json")}), ("jinja2", Jsonl("x", chat={}), {}),
    ("pyarrow", Parquet("x"), {}), ("pyarrow", Table("x", format="arrow"), {}), ("", Table("x", format="csv"), {}),
    ("pillow", Table("x", format="webdataset", transform="m:f", images="jpg"), {}),
]  # fmt: skip


@pytest.mark.parametrize(("library", "files", "transform"), USED)
def test_the_libraries_that_a_plan_uses_are_compared(library, files, transform, sources, lake) -> None:
    """P18: another one would give other bytes; one that is not used may be any."""
    always = {"stepfs", "python", "numpy"}
    (one, _), here = sources, identity_of(lake)
    one = replace(one, spec=replace(one.spec, source=files), transform=replace(one.transform, **transform))

    def compared(ext: str = ".npy") -> set[str]:
        look: Any = node_check([one], replace(here, ext=ext), lake)
        return set(look.args[0].libraries)

    assert compared() == always | ({library} if library else set())
    one.layout.listing = Listing((replace(one.layout.listing.files[0], name="0/a.jsonl.zst"),))
    assert {"torch", "zstandard"} <= compared(".pt")


def test_a_file_a_function_and_a_tokenizer_that_are_not_there_are_named(sources, lake, tmp_path) -> None:
    (tmp_path / "code/a.jsonl").unlink()
    code, prose = sources
    wrong = replace(prose, spec=changed(prose.spec, transform="my_missing:render"))
    line, other = lacks((code, wrong), lake)
    assert line.startswith(f"cannot work for source code: {tmp_path}/code/a.jsonl is gone")
    assert other.startswith("cannot work for source prose: my_missing:render: no module")
    tokenizer = replace(tokenizer_spec("gone.json"), digest="0" * 64)
    (line,) = lacks((replace(prose, transform=replace(prose.transform, tokenizer=tokenizer)),), lake)
    assert "gone.json: no such tokenizer file" in line


def test_a_lake_that_is_elsewhere_or_another_one_is_named(sources, lake, tmp_path) -> None:
    (line,) = lacks(sources, RunOptions(f"file://{tmp_path}/elsewhere"), identity_of(lake))
    assert line.startswith(f"cannot put into the lake file://{tmp_path}/elsewhere: ")
    (line,) = lacks(sources, lake, replace(identity_of(lake), lake_id="0" * 32))
    assert "another lake stands there" in line


def test_rights_to_put_are_tried(sources, lake, monkeypatch) -> None:
    async def refused(*_arguments, **_more) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stepfs.store.local.local_store.LocalStore.put", refused)
    (line,) = lacks(sources, lake)
    assert "Permission denied" in line


@pytest.mark.parametrize("store", ["lake", "source"])
def test_a_store_that_is_away_says_nothing_about_the_machine(sources, lake, monkeypatch, store) -> None:
    """The run ended with exit code 4, which asks to mend something, where a server was restarted."""

    def away(*_arguments: object, **_more: object) -> None:
        raise StoreUnreachableError("the server answers nothing")

    name = "open_lake" if store == "lake" else "format_of"
    monkeypatch.setattr(f"stepfs_producer.run.machines.{name}", away)
    with pytest.raises(StoreUnreachableError, match="the server answers nothing"):
        lacks(sources, lake)


def test_what_the_look_puts_is_known_as_an_orphan(sources, lake) -> None:
    assert lacks(sources, lake) == []

    async def keys() -> list[str]:
        store = open_store(lake.lake)
        found = await store.list(data_prefix((await open_lake(store)).lake_id))
        await store.aclose()
        return [one.key for one in found]

    (key,) = trio.run(keys)
    name = parse_data_key(key)
    assert name is not None
    assert name.epoch == 0, "before any incarnation, so no step can name it"


def test_the_directory_travels_without_the_files_of_sources(sources, tmp_path) -> None:
    (tmp_path / "prose" / "render.py").write_text("x")
    assert machines.travelling(str(tmp_path), sources) == {
        "working_dir": str(tmp_path),
        "excludes": [".?*", "__pycache__", "/code", "/prose/a.jsonl", "/prose/b.jsonl"],
    }


def test_nodes_find_the_tokenizer_in_the_directory_that_travels(sources, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)

    def named(file: str | None, directory: str) -> str | None:
        spec = tokenizer_spec(file)
        given = replace(sources[0], transform=replace(sources[0].transform, tokenizer=spec))
        return machines.as_nodes_see((given,), directory)[0].transform.tokenizer.file

    assert named(None, "plans") is None
    assert named("plans/tokenizer.json", "plans") == "tokenizer.json"
    assert named("plans/../shared/tokenizer.json", "plans") == f"{tmp_path}/shared/tokenizer.json"
    assert named("/models/tokenizer.json", "plans") == "/models/tokenizer.json"
