"""Shuffled steps: their sources for loaders, and their checkpoints."""

from __future__ import annotations

import pickle
from concurrent.futures import Future

import numpy as np
import pytest
from beside import until
from shelf import SMALL, lake_of, payload
from torch.utils.data import DataLoader

import stepfs
from stepfs import CheckpointHook, Lake, ShuffledSteps, StepDataset
from stepfs.errors import ClosedError, RefusedError, UsageError, WrongTypeError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
STEPS, SEED = 12, 1


@pytest.fixture
def lake(tmp_path):
    url = lake_of(tmp_path, STEPS, SMALL)
    with stepfs.Lake(url, group="run") as opened:
        yield opened


def test_a_data_set_gives_the_sampler_its_steps_and_is_told_nothing_twice(lake):
    dataset = stepfs.StepDataset(lake, rank=1, start=3, stop=STEPS, decode=bytes)
    sampler = stepfs.ShuffledSteps(dataset, seed=7)
    assert sorted(sampler) == list(range(STEPS - 3))
    found = list(DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=2))
    assert found == [payload(item + 3, 1, SMALL) for item in sampler]
    assert lake.counts()["bytes_fetched"] == 0, "workers read, not this process"


def test_a_data_set_keeps_its_range(lake):
    dataset = stepfs.StepDataset(lake, rank=1, start=3, stop=STEPS, decode=bytes)
    assert len(stepfs.ShuffledSteps(dataset, first=3, stop=STEPS)) == STEPS - 3
    for options in ({"first": 0}, {"stop": STEPS - 1}, {"stop": STEPS + 1}):
        with pytest.raises(UsageError, match="the data set has steps 3 to 12"):
            stepfs.ShuffledSteps(dataset, **options)


def test_a_lake_of_a_range_of_steps_says_where_the_order_begins_and_ends(lake):
    with stepfs.Lake(lake.url, steps="4:9") as part:
        sampler = stepfs.ShuffledSteps(part, seed=SEED)
        assert (sampler.next_step, sorted(sampler)) == (4, list(range(5)))
        for options in ({"stop": 4}, {"first": 3, "stop": 9}, {"stop": 10}):
            with pytest.raises(UsageError, match="has steps 4 to 9"):
                stepfs.ShuffledSteps(part, **options)


def test_a_data_set_in_the_order_of_steps_takes_no_sampler(lake):
    for options in ({}, {"stop": STEPS, "iterable": True}):
        with pytest.raises(UsageError, match="in the order of steps: give it `stop` alone"):
            stepfs.ShuffledSteps(stepfs.StepDataset(lake, rank=1, **options))


def test_a_lake_is_told_the_order_and_refuses_a_checkpoint_inside_it(lake):
    sampler, durable = stepfs.ShuffledSteps(lake, first=2, stop=STEPS, seed=SEED), stepfs.CheckpointHook(lake)
    order = [item + 2 for item in stepfs.ShuffledSteps(None, first=2, stop=STEPS, seed=SEED)]
    assert order[1] < order[0], "nobody guesses that"
    seen = []
    for item in sampler:
        seen.append(item + 2)
        assert lake.read(item + 2, 1) == payload(item + 2, 1, SMALL)
        if len(seen) == 1:
            until(lambda: lake.holds(order[1], 1))
            with pytest.raises(RefusedError, match="record 2"):
                durable(5)
    assert seen == order
    durable(STEPS)


def test_a_closed_lake_says_so_at_the_first_step(lake):
    sampler = stepfs.ShuffledSteps(lake, stop=STEPS)
    lake.close()
    with pytest.raises(ClosedError):
        next(iter(sampler))


def test_nobody_is_told_of_the_order_of_none(lake):
    dataset = stepfs.StepDataset(lake, rank=1, stop=STEPS, decode=bytes)
    alone, told = stepfs.ShuffledSteps(None, stop=STEPS, seed=4), stepfs.ShuffledSteps(dataset, seed=4)
    assert list(alone) == list(told)


@pytest.mark.parametrize("source", [7, b"/mnt/run", object(), range(9)])
def test_another_source_is_refused_when_the_sampler_is_made(source):
    with pytest.raises(WrongTypeError, match="a mount's directory, a Lake, a StepDataset"):
        stepfs.ShuffledSteps(source, stop=9)


def test_a_url_is_no_directory(lake):
    with pytest.raises(UsageError, match="Lake"):
        stepfs.ShuffledSteps(lake.url, stop=9)


@pytest.mark.parametrize("named", [False, True])
def test_all_but_a_data_set_need_an_end(lake, named):
    with pytest.raises(UsageError, match="give `stop`"):
        stepfs.ShuffledSteps("/mnt/run" if named else lake)


def test_a_data_set_travels_with_its_sampler(lake):
    dataset = stepfs.StepDataset(lake, rank=1, stop=STEPS, decode=bytes)
    sampler = stepfs.ShuffledSteps(dataset, seed=SEED)
    order = list(stepfs.ShuffledSteps(None, stop=STEPS, seed=SEED))
    assert order[1] < order[0], "nobody guesses that"
    copy = pickle.loads(pickle.dumps(dataset))
    try:
        assert copy[order[0]] == payload(order[0], 1, SMALL)
        until(lambda: copy.lake.holds(order[1], 1))
        assert [copy[item] for item in sampler] == [payload(item, 1, SMALL) for item in order]
    finally:
        copy.lake.close()


def test_a_step_has_no_length_and_says_where_the_number_of_ranks_is(lake):
    """With a length, `torch.tensor([step])` would silently read every rank and make numbers of its bytes."""
    with pytest.raises(TypeError, match=r"step 5 is a number.*`lake.world`"):
        len(lake[5])
    assert [bytes(ranks) for ranks in lake[5]] == [payload(5, rank, SMALL) for rank in range(lake.world)]
    assert np.array([lake[5]]).tolist() == [5]


FIRST, STOP = 2, 12


@pytest.fixture
def checkpointed_lake(tmp_path):
    url = lake_of(tmp_path, STOP, SMALL)
    with Lake(url, group="run", ranks=1) as opened:
        yield opened


def epoch_of(lake, **options):
    """A sampler and the loader of its steps."""
    items = StepDataset(lake, rank=1, start=FIRST, stop=STOP, decode=bytes)
    sampler = ShuffledSteps(items, seed=7)
    return sampler, DataLoader(items, sampler=sampler, batch_size=None, **options)


def refused(durable, *next_steps):
    for next_step in next_steps:
        with pytest.raises(RefusedError, match=f"record {FIRST}"):
            durable(next_step)


@pytest.mark.parametrize("workers", [0, 2])
def test_inside_an_epoch_only_its_first_step_is_recorded(checkpointed_lake, workers):
    """Workers draw ahead of what is trained: that all steps are drawn says nothing about them."""
    (sampler, loader), durable = epoch_of(checkpointed_lake, num_workers=workers), CheckpointHook(checkpointed_lake)
    durable(1)
    for trained, _ in enumerate(loader, 1):
        refused(durable, FIRST + 1, STOP - 1)
        if trained < 5:
            refused(durable, STOP)
        durable(sampler.next_step)
    refused(durable, FIRST + 1)
    durable(STOP)
    assert checkpointed_lake.first_step <= STOP


def test_an_epoch_that_was_left_is_given_up_by_the_next(checkpointed_lake):
    (sampler, loader), durable = epoch_of(checkpointed_lake), CheckpointHook(checkpointed_lake)
    for _ in loader:
        break
    refused(durable, 5, STOP)
    sampler.set_epoch(1)
    durable(5)


def test_an_epoch_that_is_resumed_needs_its_steps_from_the_start(checkpointed_lake):
    (sampler, loader), durable = epoch_of(checkpointed_lake), CheckpointHook(checkpointed_lake)
    sampler.set_epoch(0, position=3)
    refused(durable, 5, STOP)
    assert len(list(loader)) == STOP - FIRST - 3
    durable(STOP)


def test_an_epoch_that_was_whole_when_it_was_left_releases_all_of_it(checkpointed_lake):
    (sampler, loader), durable = epoch_of(checkpointed_lake), CheckpointHook(checkpointed_lake)
    sampler.set_epoch(0, position=STOP - FIRST)
    refused(durable, STOP - 1)
    assert list(loader) == []
    durable(STOP)


def test_an_epoch_that_does_not_exist_changes_nothing(checkpointed_lake):
    (sampler, loader), durable = epoch_of(checkpointed_lake), CheckpointHook(checkpointed_lake)
    training = iter(loader)
    next(training)
    with pytest.raises(UsageError, match="has no position 99"):
        sampler.set_epoch(1, position=99)
    refused(durable, 5)
    assert len(list(training)) == STOP - FIRST - 1


def test_other_samplers_and_other_draws_do_not_hide_it(checkpointed_lake):
    (sampler, loader), durable = epoch_of(checkpointed_lake), CheckpointHook(checkpointed_lake)
    training = iter(loader)
    next(training)
    evaluation = epoch_of(checkpointed_lake)
    StepDataset(checkpointed_lake, rank=0, stop=2, decode=bytes)
    list(sampler)
    refused(durable, 5)
    del training, loader, sampler
    durable(5)
    del evaluation


def test_a_save_that_ends_later_is_judged_when_it_begins(checkpointed_lake):
    (sampler, _), durable = epoch_of(checkpointed_lake), CheckpointHook(checkpointed_lake)
    next(iter(sampler))
    saved: Future[object] = Future()
    with pytest.raises(RefusedError, match="set_epoch"):
        durable.after(saved, 5)
    sampler.set_epoch(1)
    durable.after(saved, 5)
    next(iter(sampler))  # the next epoch has begun
    saved.set_result(None)
    with Lake(checkpointed_lake.url, group="run") as again:
        assert again.first_step == 5
