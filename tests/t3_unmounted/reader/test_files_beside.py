"""Columns with files of their own by `Lake` and `StepDataset`: joined in, one of them alone, or never fetched."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
from beside import until
from shelf import lake_on_disk
from step_tasks import EXAMPLE
from torch.utils.data import DataLoader

from stepfs import Lake, StepDataset
from stepfs.errors import NoSuchStepError, UsageError
from stepfs.format.grid import Grid
from stepfs_producer import Producer
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import Columns, ColumnSpec, PayloadSpec

STEPS = 4
RANKS, MICRO, _ = EXAMPLE.shape
PIXELS = ColumnSpec("pixels", "uint8", (1 << 16,), own_file=True)
SOUND = ColumnSpec("sound", "int16", (1000,), own_file=True)
WEIGHT = ColumnSpec("weight", "float32", ())
COUNTS = np.array([[1, 0, 2], [0, 3, 0], [1, 1, 1]])
TASK = replace(
    EXAMPLE,
    columns=Columns(
        COUNTS,
        (
            np.arange(2, dtype=np.uint8)[:, None].repeat(1 << 16, axis=1),
            np.arange(4000, dtype=np.int16).reshape(4, 1000),
            np.arange(3, dtype=np.float32),
        ),
    ),
)


def planned(url: str, *, of_micro_batch: bool, own: bool = True, ext: str = ".safetensors") -> None:
    columns = tuple(replace(column, own_file=own and column is not WEIGHT) for column in (PIXELS, SOUND, WEIGHT))
    files = ("", "pixels", "sound") if own else ("",)
    lake_on_disk(url, slices=Grid(RANKS, MICRO if of_micro_batch else 1, files=files), ext=ext)
    payloads, _ = construct(PayloadSpec(ext, True, 0, 11, of_micro_batch, columns), TASK)
    with Producer(url, producer_id="plan") as producer:
        for step in range(STEPS):
            producer.append(payloads, position=step)


@pytest.fixture(scope="module", params=[False, True], ids=["ranks", "micro_batches"])
def lakes(request, tmp_path_factory):
    """A lake with three files each, and the same columns in one."""
    directory = tmp_path_factory.mktemp("lakes")
    urls = [(directory / name).as_uri() for name in ("own", "one")]
    for url, own in zip(urls, (True, False), strict=True):
        planned(url, of_micro_batch=request.param, own=own)
    return urls


def items_of(url: str, workers: int = 0, **options) -> list[list[dict]]:
    dataset = StepDataset(url, stop=STEPS, **options)
    items = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    dataset.lake.close()
    return [item if isinstance(item, list) else [item] for item in items]


def as_lists(items: list[list[dict]]) -> list[list[dict]]:
    return [[{name: array.tolist() for name, array in sorted(one.items())} for one in item] for item in items]


@pytest.mark.parametrize(
    ("options", "workers"),
    [({"rank": 0}, 0), ({"rank": 1}, 2), ({"rank": 2, "mesh": "dp=3"}, 0), ({"rank": 5, "mesh": "dp=6"}, 0)],
)
def test_an_item_is_the_one_of_a_lake_with_a_single_file(lakes, options, workers):
    own, one = (as_lists(items_of(url, workers, **options)) for url in lakes)
    assert own == one
    assert {"pixels", "sound", "weight", "pixels_counts"} <= own[0][0].keys()


@pytest.mark.parametrize("mesh", [None, "dp=1"])
@pytest.mark.parametrize(("files", "absent"), [((), {"pixels", "sound"}), ("sound", {"pixels"})])
def test_a_stage_without_encoder_fetches_none_of_its_files(lakes, files, absent, mesh):
    dataset = StepDataset(lakes[0], rank=0, mesh=mesh, stop=STEPS, files=files)
    items = list(DataLoader(dataset, batch_size=None, num_workers=0))
    counts, ranks = dataset.lake.counts(), dataset.lake.rank_map
    needed = [
        len(dataset.lake.read(0, 0, micro, file))
        for micro in range(len(ranks.units_of(0)))
        for file in dataset.lake.files
    ]
    dataset.lake.close()
    first = items[0] if isinstance(items[0], list) else [items[0]]
    assert all(absent.isdisjoint(one) and "pixels_counts" in one for one in first)
    assert sum(needed) * STEPS <= counts["bytes_fetched"] <= (sum(needed) + 64 * len(needed)) * STEPS
    assert counts["requests"] <= len(needed) * STEPS


def test_a_rank_fetches_the_files_ahead_that_it_reads(lakes):
    with Lake(lakes[0], ranks=0, files=()) as lake:
        micro = 0 if lake.micro_batches > 1 else None
        for step in range(2):
            lake.read(step, 0, micro)
        assert lake.files == ("",)
        until(lambda: lake.holds(STEPS - 1, 0, micro))
        assert not any(lake.holds(step, 0, micro, "pixels") for step in range(STEPS))
    with Lake(lakes[0], ranks=0) as lake:
        for step in range(2):
            lake.read(step, 0, micro)
        until(lambda: lake.holds(STEPS - 1, 0, micro, "pixels"))


def test_a_lake_gives_the_bytes_of_each_file_and_names_a_wrong_one(lakes):
    with Lake(lakes[0], files=["pixels"]) as lake:
        copy = pickle.loads(pickle.dumps(lake))
        assert lake.files == copy.files == ("", "pixels")
        copy.close()
        [(name, array)] = safetensors.torch.load(bytes(lake[2][0, 0, "sound"])).items()
        assert (name, array.shape[1]) == ("sound", 1000)
        assert "input_ids" in safetensors.torch.load(bytes(lake[2][0, 0]))
        with pytest.raises(NoSuchStepError, match="file 'depth': this lake has '', 'pixels', 'sound'"):
            lake[2][0, 0, "depth"]
    for files in ("depth", ["pixels", "depth"], ""):
        with pytest.raises(UsageError, match=r"files names '(depth)?': .*this lake has pixels, sound beside"):
            Lake(lakes[0], files=files)
    with pytest.raises(UsageError, match=r"files names 'pixels': .*this lake has none"):
        StepDataset(lakes[1], rank=0, files="pixels")


def test_files_that_are_no_mappings_come_by_their_names(tmp_path):
    url = (tmp_path / "lake").as_uri()
    planned(url, of_micro_batch=False, ext=".tar")
    dataset = StepDataset(url, rank=0, stop=1, files="sound")
    assert {name: type(item) for name, item in dataset[0].items()} == {"": bytes, "sound": bytes}
    dataset.lake.close()
