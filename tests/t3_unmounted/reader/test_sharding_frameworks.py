"""Frameworks that deal out data by themselves, by their own code: who does it to one rank's steps is told, once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from shelf import SMALL, commit_on_disk, lake_of, lake_on_disk
from torch.utils.data import DataLoader
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
        pytest.param(by_lightning, "use_distributed_sampler=False", marks=pytest.mark.slow),
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
