"""The store is put back to an older copy under trainers: their readers, their states and their checkpoints notice."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from lakework import list_groups, reclaim
from shelf import SMALL, commit_on_disk, lake_on_disk, payload
from torch.utils.data import DataLoader

from stepfs import CheckpointHook, Lake, StepDataset, StreamState
from stepfs._internal.clock import SystemClock
from stepfs.errors import OtherHistoryError, RefusedError
from stepfs.format.ids import Step
from stepfs.lake.control import Control, Group
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store

pytestmark = pytest.mark.usefixtures("nothing_is_left")

OTHER = 2 * SMALL  # bytes of the steps of the new history


@pytest.fixture
def url(tmp_path) -> str:
    url = (tmp_path / "lake").as_uri()
    lake_on_disk(url)
    commit_on_disk(url, range(5))
    shutil.copytree(tmp_path / "lake", tmp_path / "copy")
    commit_on_disk(url, range(5, 10))
    return url


@pytest.fixture
def put_back(url, tmp_path) -> Callable[[int], None]:
    """The copy, of five steps, and so many new ones."""

    def put_back(more: int) -> None:
        shutil.rmtree(tmp_path / "lake")
        shutil.copytree(tmp_path / "copy", tmp_path / "lake")
        if more:
            commit_on_disk(url, range(5, 5 + more), OTHER)

    return put_back


def all_of(lake: Lake) -> list[int]:
    assert [lake[step][0] == payload(step, 0, SMALL) for step in lake.steps] == [True] * len(lake)
    return [int(step) for step in lake]


@pytest.mark.parametrize("more", [0, 5, 9])
@pytest.mark.parametrize("tail_bytes", [1, 4 << 20])
def test_a_lake_that_rested_or_travelled_does_not_go_on_with_another_history(
    url, put_back, more, tail_bytes, monkeypatch
):
    monkeypatch.setattr("stepfs.reader.lake._PICKLED_BYTES_MAX", tail_bytes)
    with Lake(url) as lake:
        assert all_of(lake) == list(range(10))
        travels = pickle.dumps(lake)
        lake.rest()
        put_back(more)
        for other in (lake, pickle.loads(travels)):
            with pytest.raises(OtherHistoryError, match="restart this process"):
                other.read(3, 0)
            other.close()
    with Lake(url) as lake:
        assert lake.next_step == 5 + more


def test_workers_of_the_second_epoch_do_not_train_on_the_other_history(url, put_back):
    dataset = StepDataset(url, rank=0, stop=10)
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert len(list(loader)) == 10
    put_back(5)
    with pytest.raises(OtherHistoryError, match="restart this process"):
        list(loader)
    dataset.lake.close()


def state_at(url: str, next_step: int) -> dict[str, object]:
    with Lake(url) as lake:
        stream = StreamState.of_lake(lake)
        stream.next_step = next_step
        return stream.state_dict()


def load(url: str, state: dict[str, object]) -> int:
    with Lake(url) as lake:
        stream = StreamState.of_lake(lake)
        stream.load_state_dict(state)
        return stream.next_step


@pytest.mark.parametrize(("more", "why"), [(0, "no such step: .* later$"), (5, "another such step: .* checkpoint$")])
def test_a_state_of_steps_that_the_lake_has_lost_is_refused(url, put_back, more, why):
    states = {step: state_at(url, step) for step in (0, 4, 5, 6, 10)}
    assert [load(url, state) for state in states.values()] == list(states)
    put_back(more)
    for step, state in states.items():
        if step <= 5:
            assert load(url, state) == step
        else:
            with pytest.raises(RefusedError, match=rf"up to step {step - 1} of lake \w+, and here is {why}"):
                load(url, state)


def test_a_state_whose_last_step_was_reclaimed_or_that_is_of_the_parent_resumes(url, tmp_path):
    states = [state_at(url, step) for step in (3, 7)]
    child = (tmp_path / "child").as_uri()

    async def work() -> None:
        store, other = open_store(url), open_store(child)
        identity = await open_lake(store)
        await fork(await LogReader.open(store, identity), other, Cut(Step(8), Step(8), Step(8)), SystemClock())
        await Group.of(store, identity, "run").add(Step(7))
        for name in await list_groups(store, identity):
            if name != "run":
                await Group(Control(store, identity), name).retire()
        await reclaim(store, identity)

    trio.run(work)
    with Lake(url) as lake:
        assert lake.first_step == 7
    commit_on_disk(child, range(8, 10))
    for lake_url in (url, child):
        assert [load(lake_url, state) for state in states] == [3, 7]


def kept(url: str) -> list[int]:
    async def read() -> list[int]:
        store = open_store(url)
        groups = await list_groups(store, await open_lake(store))
        return list(groups["run"].kept) if "run" in groups else []

    return trio.run(read)


@pytest.mark.logs("cannot follow the lake .*another history")  # if the reader looks meanwhile
@pytest.mark.parametrize("more", [0, 5, 9])
@pytest.mark.parametrize("by_url", [False, True])
def test_a_hook_records_no_checkpoint_of_steps_that_the_lake_has_lost(url, put_back, more, by_url):
    with Lake(url, group="run") as lake:
        hook = CheckpointHook(url, group="run") if by_url else CheckpointHook(lake)
        hook(2)
        put_back(more)
        for next_step in (3, 8):
            with pytest.raises(OtherHistoryError, match="another history"):
                hook(next_step)
        assert kept(url) == []
    CheckpointHook(url, group="run")(4)
    assert kept(url) == [4]


def test_a_state_of_a_lake_that_cannot_be_asked_is_saved_all_the_same(url, tmp_path):
    lake = Lake(url)
    stream = StreamState.of_lake(lake)
    stream.next_step = 3
    lake.close()
    assert stream.state_dict()["behind"] is None
    assert load(url, stream.state_dict()) == 3
    assert Path(tmp_path / "lake").is_dir()
