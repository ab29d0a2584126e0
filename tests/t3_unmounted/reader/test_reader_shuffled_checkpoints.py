"""Checkpoints of a training run that reads a shuffled epoch without a mount: none releases a step that it needs."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from shelf import SMALL, commit_on_disk, lake_on_disk
from torch.utils.data import DataLoader

from stepfs import CheckpointHook, Lake, ShuffledSteps, StepDataset
from stepfs.errors import RefusedError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
FIRST, STOP = 2, 12


@pytest.fixture
def lake(tmp_path):
    url = (tmp_path / "lake").as_uri()
    lake_on_disk(url)
    commit_on_disk(url, range(STOP), SMALL)
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
def test_inside_an_epoch_only_its_first_step_is_recorded(lake, workers):
    """Workers draw ahead of what is trained: that all steps are drawn says nothing about them."""
    (sampler, loader), durable = epoch_of(lake, num_workers=workers), CheckpointHook(lake)
    durable(1)
    for trained, _ in enumerate(loader, 1):
        refused(durable, FIRST + 1, STOP - 1)
        if trained < 5:
            refused(durable, STOP)
        durable(sampler.next_step)
    refused(durable, FIRST + 1)
    durable(STOP)
    assert lake.first_step <= STOP


def test_an_epoch_that_was_left_is_given_up_by_the_next(lake):
    (sampler, loader), durable = epoch_of(lake), CheckpointHook(lake)
    for _ in loader:
        break
    refused(durable, 5, STOP)
    sampler.set_epoch(1)
    durable(5)


def test_an_epoch_that_is_resumed_needs_its_steps_from_the_start(lake):
    (sampler, loader), durable = epoch_of(lake), CheckpointHook(lake)
    sampler.set_epoch(0, position=3)
    refused(durable, 5, STOP)
    assert len(list(loader)) == STOP - FIRST - 3
    durable(STOP)


def test_an_epoch_that_was_whole_when_it_was_left_releases_all_of_it(lake):
    (sampler, loader), durable = epoch_of(lake), CheckpointHook(lake)
    sampler.set_epoch(0, position=STOP - FIRST)
    refused(durable, STOP - 1)
    assert list(loader) == []
    durable(STOP)


def test_an_epoch_that_does_not_exist_changes_nothing(lake):
    (sampler, loader), durable = epoch_of(lake), CheckpointHook(lake)
    training = iter(loader)
    next(training)
    with pytest.raises(UsageError, match="has no position 99"):
        sampler.set_epoch(1, position=99)
    refused(durable, 5)
    assert len(list(training)) == STOP - FIRST - 1


def test_other_samplers_and_other_draws_do_not_hide_it(lake):
    (sampler, loader), durable = epoch_of(lake), CheckpointHook(lake)
    training = iter(loader)
    next(training)
    evaluation = epoch_of(lake)
    StepDataset(lake, rank=0, stop=2, decode=bytes)
    list(sampler)
    refused(durable, 5)
    del training, loader, sampler
    durable(5)
    del evaluation


def test_a_save_that_ends_later_is_judged_when_it_begins(lake):
    (sampler, _), durable = epoch_of(lake), CheckpointHook(lake)
    next(iter(sampler))
    saved: Future[object] = Future()
    with pytest.raises(RefusedError, match="set_epoch"):
        durable.after(saved, 5)
    sampler.set_epoch(1)
    durable.after(saved, 5)
    next(iter(sampler))  # the next epoch has begun
    saved.set_result(None)
    with Lake(lake.url, group="run") as again:
        assert again.first_step == 5
