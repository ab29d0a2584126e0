"""torchdata's `StatefulDataLoader`: a loader that goes on gives each step once, and reads none twice."""

from __future__ import annotations

from typing import Any, cast

import pytest
from shelf import SMALL, lake_of, payload
from torchdata.stateful_dataloader import StatefulDataLoader

from stepfs import CheckpointHook, Lake, ShuffledSteps, StepDataset
from stepfs.errors import RefusedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 on torch 2.13
]
STEPS, START = 26, 2


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return lake_of(tmp_path_factory.mktemp("lakes"), STEPS, SMALL)


class Reads:
    """A decoder that notes the steps that are read, in files, because workers are processes."""

    def __init__(self, path):
        self.path = path

    def __call__(self, view):
        with self.path.open("a") as file:
            print(int(bytes(view[:12]).partition(b"/")[0]), file=file)
        return bytes(view)

    def steps(self):
        return sorted(map(int, self.path.read_text().split()))


def stream(url, decode, batch_size, workers):
    dataset = StepDataset(url, rank=1, start=START, stop=STEPS, iterable=True, batch_size=batch_size, decode=decode)
    return None, loader_of(dataset, batch_size, workers)


def shuffled(url, decode, batch_size, workers):
    dataset = StepDataset(url, rank=1, start=START, stop=STEPS, decode=decode)
    sampler = ShuffledSteps(dataset, seed=5)
    return sampler, loader_of(dataset, batch_size, workers, sampler=sampler)


def loader_of(dataset, batch_size, workers, **options):
    collate = {} if batch_size is None else {"collate_fn": list}
    return StatefulDataLoader(dataset, batch_size=batch_size, num_workers=workers, **collate, **options)


def flat(batches, batch_size):
    return list(batches) if batch_size is None else [item for batch in batches for item in batch]


@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("make", [stream, shuffled])
@pytest.mark.parametrize(
    ("workers", "taken"), [
        (0, 1), (2, 3),
        *(pytest.param(*both, marks=pytest.mark.nightly) for both in ((0, 0), (0, 3), (0, "all"), (2, 0), (2, 1), (2, "all"))),
    ],
)  # fmt: skip
def test_a_loader_goes_on_where_it_stood(url, tmp_path, make, batch_size, workers, taken):
    sampler, loader = make(url, Reads(tmp_path / "first"), batch_size, workers)
    order = list(range(START, STEPS))
    if sampler is not None:
        sampler.set_epoch(1)
        order = [item + START for item in sampler]
    given = iter(loader)
    before = list(given) if taken == "all" else [next(given) for _ in range(taken)]
    state = loader.state_dict()
    del given
    sampler, again = make(url, reads := Reads(tmp_path / "again"), batch_size, workers)
    again.load_state_dict(state)
    rest = list(again)
    if taken == "all":  # the epoch has ended: this is the next pass
        assert flat(before, batch_size) == flat(rest, batch_size) == [payload(step, 1, SMALL) for step in order]
        return
    assert flat(before, batch_size) + flat(rest, batch_size) == [payload(step, 1, SMALL) for step in order]
    assert reads.steps() == sorted(order[len(flat(before, batch_size)) :]), "none is read twice"
    assert len(flat(again, batch_size)) == len(order), "the next pass is whole"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_state_behind_the_last_step_begins_no_other_epoch(url, workers, batch_size):
    """It would be empty, without a word."""
    sampler, loader = shuffled(url, bytes, batch_size, workers)
    sampler.set_epoch(1)
    for _ in loader:
        state = loader.state_dict()  # in the loop, as trainers save
    for epoch in (1, 2):
        sampler, again = shuffled(url, bytes, batch_size, workers)
        again.load_state_dict(state)
        sampler.set_epoch(epoch)
        if epoch == 2:
            with pytest.raises(RefusedError, match=r"of epoch 1, and set_epoch\(2\) was .*position=…"):
                list(again)
        else:
            assert list(again) == []
    sampler, fresh = shuffled(url, bytes, batch_size, workers)
    sampler.set_epoch(2, position=4)
    assert len(flat(fresh, batch_size)) == STEPS - START - 4


def test_a_state_of_an_epoch_goes_on_in_no_other(url):
    sampler, loader = shuffled(url, bytes, 2, 2)
    given = iter(loader)
    next(given)
    state = loader.state_dict()
    del given
    sampler, again = shuffled(url, bytes, 2, 2)
    again.load_state_dict(state)
    sampler.set_epoch(1)
    with pytest.raises(RefusedError, match=r"of epoch 0, and set_epoch\(1\) was called: call set_epoch\(0\)"):
        list(again)


def test_a_shuffled_resume_fetches_ahead_and_keeps_its_first_step(url, tmp_path):
    """In the process, whose reader can be asked; a worker decides alike."""
    with Lake(url, group="run", ranks=1) as lake:
        dataset = StepDataset(lake, rank=1, start=START, stop=STEPS, decode=bytes)
        sampler, durable = ShuffledSteps(dataset, seed=5), CheckpointHook(lake)
        loader = StatefulDataLoader(dataset, sampler=sampler, batch_size=None)
        given = iter(loader)
        for _ in range(9):
            next(given)
        state = loader.state_dict()
        sampler.set_epoch(0)
        durable(START + 1)  # no epoch has begun
        loader.load_state_dict(state)
        hits = lake.counts()["hits"]
        given = iter(loader)
        with pytest.raises(RefusedError, match=f"record {START}"):
            durable(START + 9)
        assert len(list(given)) == STEPS - START - 9
        assert lake.counts()["hits"] > hits
        durable(STEPS)


def test_the_state_of_another_loader_is_refused(url, tmp_path):
    def of(start, **options):
        dataset = StepDataset(url, rank=1, start=start, stop=STEPS, iterable=True, decode=bytes)
        return StatefulDataLoader(dataset, batch_size=None, **options)

    loader, other = of(START, num_workers=2), of(START + 1, num_workers=2)
    given = iter(loader)
    next(given)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(RefusedError, match="give the dataset the `start`"):
        iter(other)
    del given
    dataset = StepDataset(url, rank=1, stop=STEPS, iterable=True, decode=bytes)
    with pytest.raises(RefusedError, match="trained on lake None"):
        cast("Any", dataset).__iter__().load_state_dict({"next_step": 3})
    sampler = ShuffledSteps(None, stop=STEPS)
    with pytest.raises(RefusedError, match="at place 99"):
        cast("Any", sampler).__iter__().load_state_dict({"place": 99})
