"""Frameworks that deal out data by themselves, by their own code: who does it to one rank's steps is told, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nightly
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from shelf import SMALL, commit_on_disk, lake_of, lake_on_disk
from torch.utils.data import ConcatDataset, DataLoader, Subset, random_split
from torch.utils.data.distributed import DistributedSampler

from stepfs import ShuffledSteps, StepDataset
from stepfs.reader import dataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
STEPS = 12
TWO = {"num_replicas": 2, "rank": 1}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    return lake_of(tmp_path_factory.mktemp("lakes"), STEPS, SMALL)


@pytest.fixture
def of_two(url, monkeypatch):
    """Makes data sets in a job of two processes."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dataset, "_told", False)
    return lambda **options: StepDataset(url, rank=1, stop=STEPS, decode=len, **options)


def by_torch(steps):
    DistributedSampler(steps, **TWO)


def by_lightning(steps, **options):
    nightly.needs("lightning")
    from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler  # noqa: PLC0415 - seconds

    loader = DataLoader(steps, batch_size=None, **options)
    list(_get_distributed_sampler(loader, shuffle=False, overfit_batches=0, **TWO))


def by_accelerate(steps, **options):
    two = {"num_processes": 2, "process_index": 1, "dispatch_batches": False}
    list(prepare_data_loader(DataLoader(steps, batch_size=2, collate_fn=list, **options), **two))


@pytest.mark.logs("a framework deals it out once more among 2 processes")
@pytest.mark.parametrize(
    ("deal", "advice"),
    [
        (by_torch, "no `DistributedSampler`"),
        pytest.param(by_lightning, "use_distributed_sampler=False", marks=pytest.mark.nightly),
        (by_accelerate, "do not `prepare`"),
    ],
)
@pytest.mark.parametrize("shuffles", [False, True])
def test_who_deals_out_one_ranks_steps_is_told_once(of_two, caplog, deal, advice, shuffles):
    steps = of_two()
    options = {"sampler": ShuffledSteps(steps)} if shuffles and deal is not by_torch else {}
    for _ in range(2):
        deal(steps, **options)
    [told] = [record.getMessage() for record in caplog.records if record.name == "stepfs.reader"]
    assert advice in told


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{"dispatch_batches": False}, {"dispatch_batches": True, "put_on_device": True}])
def test_an_iterable_data_set_notices_it_too(of_two, tmp_path, monkeypatch, options, workers):
    def told(message, *values):
        with (tmp_path / "told").open("a") as file:  # by a worker, which is another process
            print(message % values, file=file)

    monkeypatch.setattr(dataset, "_log", SimpleNamespace(warning=told))
    loader = DataLoader(of_two(iterable=True), batch_size=2, num_workers=workers)
    next(iter(prepare_data_loader(loader, num_processes=2, process_index=0, **options)))
    [line] = (tmp_path / "told").read_text().splitlines()
    assert "in accelerate do not `prepare` the loader" in line


def test_who_reads_all_of_it_is_told_nothing(of_two, url, tmp_path, monkeypatch, caplog):
    steps = of_two()
    list(DataLoader(steps, batch_size=None, sampler=ShuffledSteps(steps)))
    list(DataLoader(of_two(iterable=True), batch_size=None))
    list(skip_first_batches(DataLoader(steps, batch_size=2, collate_fn=list), 1))
    single = (tmp_path / "single").as_uri()
    lake_on_disk(single, slices=1)
    commit_on_disk(single, range(2), SMALL, slices=1)
    by_torch(StepDataset(single, rank=0, stop=2, decode=bytes))  # all ranks read one slice: it may be dealt out
    monkeypatch.setenv("WORLD_SIZE", "1")
    by_torch(steps)
    assert "framework" not in caplog.text


class Wrapper:
    """A data set of one's own."""

    def __init__(self, steps):
        self.steps = steps

    def __len__(self):
        return STEPS

    def __getitem__(self, item):
        return self.steps[item]


WRAPPERS = {
    "Subset": lambda steps: Subset(steps, range(STEPS)),
    "random_split": lambda steps: random_split(steps, [STEPS - 2, 2])[0],
    "ConcatDataset": lambda steps: ConcatDataset([steps]),
    "one's own": Wrapper,
}


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The lines that the data set has told, in any process."""

    def tell(message, *values):
        with (tmp_path / "told").open("a") as file:  # by a worker, which is another process
            print(message % values, file=file)

    monkeypatch.setattr(dataset, "_log", SimpleNamespace(warning=tell))
    return lambda: (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrapper_hides_nobody_who_deals_out(of_two, told, wrapper, shuffle, workers):
    wrapped = wrapper(of_two())
    sampler = DistributedSampler(wrapped, shuffle=shuffle, **TWO)
    list(DataLoader(wrapped, sampler=sampler, num_workers=workers))
    assert {"no `DistributedSampler`" in line for line in told()} == {True}
    assert len(told()) == max(1, workers)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_stride_of_the_jobs_size_is_told_whoever_makes_it(url, monkeypatch, told, batch, workers):
    """Megatron's sampler, and a spawned worker, in whose process is no loader."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dataset, "_told", False)
    steps: Any = StepDataset(url, rank=1, stop=STEPS * 4, decode=len)
    monkeypatch.setattr(steps, "_read", lambda step: step)
    monkeypatch.setattr(steps, "_enter", lambda: (0, workers))
    for first in range(0, 4 * 2 * batch * workers, 2 * batch * workers):
        steps.__getitems__(list(range(first, first + batch)))
    assert len(told()) == 1
    assert "2 processes" in told()[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrapper", [*WRAPPERS.values(), lambda steps: steps], ids=[*WRAPPERS, "bare"])
def test_who_reads_each_step_of_its_rank_is_left_alone(of_two, told, wrapper, workers):
    for shuffle in (False, True):
        list(DataLoader(wrapper(of_two()), shuffle=shuffle, num_workers=workers, batch_size=2))
    assert told() == []
