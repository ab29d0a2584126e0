"""A second lake beside the first: rows that belong together come together, and all others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import trio
from safetensors.numpy import save
from shelf import lake_on_disk
from torch.utils.data import DataLoader

from stepfs import CheckpointHook, Lake, ShuffledSteps, StepDataset
from stepfs._internal.clock import SystemClock
from stepfs.errors import NoSuchStepError, RefusedError, StepfsError, UsageError
from stepfs.format.ids import Step
from stepfs.lake.fork import Cut, fork
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.reader.annotations import joined
from stepfs.store.opening import open_store
from stepfs_producer import Producer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
STEPS, RANKS = 6, 2


def rows(step: int, rank: int) -> np.ndarray:
    return np.arange(4, dtype=np.int64) + 100 * step + 10 * rank


def base_lake(url: str, steps: range = range(STEPS)) -> str:
    if steps.start == 0:
        lake_on_disk(url, slices=RANKS, ext=".safetensors")
    with Producer(url, producer_id="tok") as producer:
        for step in steps:
            producer.append([save({"input_ids": rows(step, rank)}) for rank in range(RANKS)], position=step)
    return url


def annotate(url: str, beside: str, steps: range, name: str = "teacher") -> str:
    lake_on_disk(beside, slices=RANKS, ext=".safetensors")
    with Lake(url) as lake, Producer(beside, producer_id="teacher") as producer:
        for step in steps:
            found = [save({name: rows(step, rank) * 3}) for rank in range(RANKS)]
            producer.append(found, position=step, note=lake[step].tie(model="7b"))
    return beside


def forked(url: str, child: str, cut: Cut) -> str:
    async def work() -> None:
        store = open_store(url)
        await fork(await LogReader.open(store, await open_lake(store)), open_store(child), cut, SystemClock())

    trio.run(work)
    return child


@pytest.fixture
def url(tmp_path):
    return base_lake((tmp_path / "lake").as_uri())


@pytest.fixture
def beside(tmp_path, url):
    return annotate(url, (tmp_path / "beside").as_uri(), range(STEPS))


def read(url: str, beside: str, steps: range) -> list[int]:
    """The steps that come whole."""
    dataset: Any = StepDataset(url, beside=beside, rank=1, start=steps.start, stop=steps.stop, memory="128M")
    found = []
    for step, batch in zip(steps, dataset, strict=True):
        assert batch.keys() == {"input_ids", "teacher"}
        assert torch.equal(batch["input_ids"] * 3, batch["teacher"])
        assert batch["input_ids"][0] == 100 * step + 10
        found.append(step)
    for lake in dataset.lakes:
        lake.close()
    return found


@pytest.mark.parametrize(("iterable", "workers"), [(True, 2), (False, 2), (False, 0)])
def test_both_come_in_one_batch_in_any_process(url, beside, iterable, workers):
    dataset = StepDataset(url, beside=beside, rank=0, stop=STEPS, iterable=iterable, memory="128M")
    found = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert [int(batch["input_ids"][0]) for batch in found] == [100 * step for step in range(STEPS)]
    assert all(torch.equal(batch["teacher"], 3 * batch["input_ids"]) for batch in found)
    with Lake(beside) as lake:
        assert lake[2].note["model"] == "7b"


def test_an_epoch_in_random_order_and_a_group_concern_both(url, beside):
    dataset = StepDataset(url, beside=beside, rank=0, stop=STEPS, files=(), group="run", memory="128M")
    sampler = ShuffledSteps(dataset, seed=3)
    loader = DataLoader(dataset, sampler=sampler, batch_size=None)
    assert [int(batch["teacher"][0]) for batch in loader] == [300 * item for item in sampler]
    sampler.set_epoch(1)
    next(iter(sampler))
    for lake in dataset.lakes:
        assert lake.group == "run"
        with pytest.raises(RefusedError, match="order"):
            CheckpointHook(lake)(2)
        lake.close()


def test_a_teacher_that_began_late_has_numbers_of_its_own(tmp_path, url):
    beside = annotate(url, (tmp_path / "beside").as_uri(), range(2, STEPS))
    assert read(url, beside, range(2, STEPS)) == [2, 3, 4, 5]
    with pytest.raises(NoSuchStepError, match=r"begins at step 2 of .*/lake, behind 1"):
        read(url, beside, range(1, STEPS))


def test_a_fork_shares_what_it_shares(tmp_path, url, beside):
    child = forked(url, (tmp_path / "child").as_uri(), Cut(Step(4), Step(4), Step(4), until=Step(4)))
    base_lake(child, range(4, STEPS))  # equal bytes, and yet another step
    assert read(child, beside, range(4)) == [0, 1, 2, 3]
    with pytest.raises(RefusedError, match=r"step 4 of .*/beside belongs to step 4, of another lake or history"):
        read(child, beside, range(4, 5))


def test_steps_that_a_fork_leaves_out_are_left_out_of_both(tmp_path, url, beside):
    cut = Cut(Step(1), Step(1), Step(3))
    child, other = (forked(lake, (tmp_path / name).as_uri(), cut) for lake, name in ((url, "a"), (beside, "b")))
    dataset: Any = StepDataset(child, beside=other, rank=0, stop=STEPS - 2, memory="128M")
    assert [int(batch["teacher"][0]) for batch in dataset] == [0, 900, 1200, 1500]
    with pytest.raises(RefusedError, match="belongs to step 1, of another lake or history"):
        read(child, beside, range(1, 2))


def test_what_belongs_to_nothing_or_has_other_rows_is_refused(tmp_path, url, beside):
    twin = base_lake((tmp_path / "twin").as_uri())
    with pytest.raises(RefusedError, match="belongs to step 0, of another lake or history"):
        read(twin, beside, range(1))
    with pytest.raises(RefusedError, match=r"annotates no lake: its steps need notes"):
        read(url, twin, range(1))
    wide = (tmp_path / "wide").as_uri()
    lake_on_disk(wide, slices=3, ext=".safetensors")
    with pytest.raises(RefusedError, match="a row needs the file of its row"):
        read(url, wide, range(1))
    same = annotate(url, (tmp_path / "same").as_uri(), range(1), name="input_ids")
    with pytest.raises(UsageError, match="both lakes have an array 'input_ids'"):
        read(url, same, range(1))
    with Lake(url) as lake, pytest.raises(UsageError, match="two URLs, or two Lakes"):
        StepDataset(lake, beside=beside, rank=0)
    with Lake(url) as lake, pytest.raises(StepfsError, match="is not in the lake"):
        lake.tie(STEPS)


def test_micro_batches_have_a_row_each():
    parts = [{"input_ids": torch.zeros(1, 4)}, {"input_ids": torch.ones(1, 4)}]
    teacher = torch.arange(8).reshape(2, 4)
    assert [part["teacher"].tolist() for part in joined(parts, {"teacher": teacher})] == [
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
    ]
    with pytest.raises(UsageError, match="'teacher' beside has 3 rows for 2 micro-batches"):
        joined(parts, {"teacher": torch.zeros(3)})
