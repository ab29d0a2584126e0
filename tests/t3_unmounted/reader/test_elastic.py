"""A rank's micro-batches by `Lake` and `StepDataset`: the same global batch for every number of data ranks."""

from __future__ import annotations

import io
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
from beside import until
from declared import column_spec
from shelf import lake_on_disk
from step_tasks import EXAMPLE
from torch.utils.data import DataLoader

from stepfs import Lake, StepDataset, StreamState
from stepfs.errors import NoSuchStepError, UsageError
from stepfs.format.grid import Grid
from stepfs.torch import micro_batches
from stepfs_producer import Producer
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec
from stepfs_producer.plan.ragged import Ragged

STEPS = 3
RANKS, MICRO, _ = EXAMPLE.shape
FILES = {False: Grid(RANKS), True: Grid(RANKS, MICRO)}


def planned(url: str, *, of_micro_batch: bool, ext: str = ".safetensors") -> list[list[bytes]]:
    """A lake as a plan makes it, with another padding in each step; its payloads."""
    lake_on_disk(url, slices=FILES[of_micro_batch], ext=ext)
    steps = [construct(PayloadSpec(ext, True, padding, 11, of_micro_batch), EXAMPLE)[0] for padding in range(STEPS)]
    with Producer(url, producer_id="plan") as producer:
        for step, payloads in enumerate(steps):
            producer.append(payloads, position=step)
    return steps


@pytest.fixture(scope="module", params=[False, True], ids=["ranks", "micro_batches"])
def lake(request, tmp_path_factory):
    url = (tmp_path_factory.mktemp("lakes") / "lake").as_uri()
    planned(url, of_micro_batch=request.param)
    return url, request.param


def expected(step: int) -> list[dict]:
    """The micro-batches of a step, in order."""
    payloads, _ = construct(PayloadSpec(".safetensors", True, step, 11), EXAMPLE)
    return list(itertools.chain(*(micro_batches(safetensors.torch.load(payload)) for payload in payloads)))


def same(found: list[dict], wanted: list[dict]) -> None:
    assert [set(each) for each in found] == [set(each) for each in wanted]
    for left, right in zip(found, wanted, strict=True):
        assert all((left[name] == right[name]).all() and left[name].dtype == right[name].dtype for name in left)


@pytest.mark.parametrize(
    ("mesh", "workers"),
    [
        ("dp=2", 0),
        ("tp=2,dp=3", 2),
        *(pytest.param(mesh, 0, marks=pytest.mark.nightly) for mesh in ("dp=1", "dp=6", "dp_a=3,dp_b=2,cp=2")),
    ],
)
def test_every_number_of_data_ranks_reads_the_same_global_batch(lake, mesh, workers):
    ranks: dict[int, list[list[dict]]] = {}
    with Lake(lake[0]) as plain:
        world = StepDataset(lake[0], rank=0, mesh=mesh, stop=STEPS)
        map_of, count = world.lake.rank_map, world.lake.world
        world.lake.close()
        assert plain.micro_batches == (MICRO if lake[1] else 1)
    for rank in range(count):
        dataset = StepDataset(lake[0], rank=rank, mesh=mesh, stop=STEPS)
        steps = list(DataLoader(dataset, batch_size=None, num_workers=workers))
        dataset.lake.close()
        first = ranks.setdefault(map_of.data_rank_of(rank), steps)
        for one, other in zip(first, steps, strict=True):
            same(one, other)
    assert len(ranks) == map_of.data_ranks
    for step in range(STEPS):
        same([each for data in sorted(ranks) for each in ranks[data][step]], expected(step))


def test_a_rank_fetches_no_more_than_the_files_it_needs(lake):
    dataset = StepDataset(lake[0], rank=5, mesh="dp=6", stop=STEPS)
    files = [dataset.lake.read(step, 5) for step in range(STEPS)]
    assert len([dataset[step] for step in range(STEPS)]) == STEPS
    counts = dataset.lake.counts()
    dataset.lake.close()
    assert sum(map(len, files)) <= counts["bytes_fetched"] <= sum(map(len, files)) + 64 * STEPS


def test_a_data_size_that_does_not_divide_the_micro_batches_names_the_nearest(lake):
    def read(mesh):
        dataset = StepDataset(lake[0], rank=0, mesh=mesh, stop=STEPS)
        try:
            return dataset[0]
        finally:
            dataset.lake.close()

    for mesh, near in (("dp=4", "dp=3 and dp=6 would"), ("dp=12", "dp=6 would")):
        with pytest.raises(UsageError, match=f"do not divide the 6 .*{near}"):
            read(mesh)


def test_without_a_mesh_a_rank_reads_what_the_lakes_rank_reads(lake):
    url, of_micro_batch = lake
    dataset = StepDataset(url, rank=1, stop=STEPS)
    found = dataset[2]
    dataset.lake.close()
    same(found if of_micro_batch else micro_batches(found), expected(2)[MICRO:])


def test_a_lake_names_its_micro_batches(tmp_path):
    url = (tmp_path / "lake").as_uri()
    steps = planned(url, of_micro_batch=True)
    with (
        Producer(url, producer_id="own") as producer,
        pytest.raises(UsageError, match=r"2 payloads for a lake of 6 slices \(ranks 2 × micro-batches 3\); pass one"),
    ):
        producer.append(steps[0][:2], position=0)
    with Lake(url, mesh="dp=3,tp=2") as lake:
        assert (lake.world, lake.micro_batches, lake.slices) == (6, 2, 6)
        assert [bytes(lake[1][rank, micro]) for rank in range(6) for micro in range(2)] == [
            steps[1][rank // 2 * 2 + micro] for rank in range(6) for micro in range(2)
        ]
        with pytest.raises(UsageError, match=r"rank 3 reads 2 micro-batches: name one, from \[3, 0\] to \[3, 1\]"):
            lake[1][3]
        for place in ((3, 2), (3, -1), (6, 0)):
            with pytest.raises(NoSuchStepError, match="has"):
                lake[1][place]
        copy = pickle.loads(pickle.dumps(lake))
        assert (copy.micro_batches, copy.rank_map) == (2, lake.rank_map)
        assert bytes(copy[0][5, 1]) == steps[0][5]
        copy.close()
        assert lake.holds(0, 5, 1) is False
        assert bytes(lake.read(0, 5, 1)) == steps[0][5]
        assert lake.holds(0, 5, 1) is True
    with Lake(url, mesh="dp=6") as lake:
        assert (lake.micro_batches, bytes(lake[1][5]), bytes(lake[1][5, 0])) == (1, steps[1][5], steps[1][5])


def test_a_checkpoint_of_one_size_resumes_with_another(tmp_path):
    url = (tmp_path / "lake").as_uri()
    planned(url, of_micro_batch=True)
    with Lake(url, mesh="dp=6") as many, Lake(url, mesh="dp=1") as one:
        stream = StreamState.of_lake(many)
        stream.next_step = 2
        resumed = StreamState.of_lake(one)
        resumed.load_state_dict(stream.state_dict())
        assert resumed.next_step == 2


@pytest.mark.parametrize("ext", [".npy", ".bin"])
def test_files_that_cannot_be_split_are_read_whole_where_the_ranks_divide_them(tmp_path, ext):
    url = (tmp_path / "lake").as_uri()
    steps = planned(url, of_micro_batch=False, ext=ext)
    dataset = StepDataset(url, rank=0, mesh="dp=1", stop=STEPS)
    found = dataset[1]
    dataset.lake.close()
    whole = steps[1] if ext == ".bin" else [np.load(io.BytesIO(payload)) for payload in steps[1]]
    assert len(found) == RANKS
    assert all(np.array_equal(left, right) for left, right in zip(found, whole, strict=True))
    dataset = StepDataset(url, rank=0, mesh="dp=6", stop=STEPS)
    with pytest.raises(UsageError, match=r"divide the 2 .* only \.safetensors and \.pt .*output\.files: micro_batches"):
        dataset[0]
    dataset.lake.close()


def test_a_lake_is_refused_by_a_mesh_that_only_a_data_set_can_serve(tmp_path):
    url = (tmp_path / "lake").as_uri()
    planned(url, of_micro_batch=False)
    with pytest.raises(UsageError, match=r"^mesh='dp=6': .*StepDataset\(mesh=…\)"):
        Lake(url, mesh="dp=6")


PAIRS = 4
PIXELS = column_spec("pixels", "uint8", (1 << 16,), own_file=True)
SOUND = column_spec("sound", "int16", (1000,), own_file=True)
WEIGHT = column_spec("weight", "float32", ())
COUNTS = np.array([[1, 0, 2], [0, 3, 0], [1, 1, 1]])
TASK = replace(
    EXAMPLE,
    columns=(
        Ragged(np.arange(2, dtype=np.uint8)[:, None].repeat(1 << 16, axis=1), np.cumsum(COUNTS[:, 0])),
        Ragged(np.arange(4000, dtype=np.int16).reshape(4, 1000), np.cumsum(COUNTS[:, 1])),
        Ragged(np.arange(3, dtype=np.float32), np.cumsum(COUNTS[:, 2])),
    ),
)


def planned_beside(url: str, *, of_micro_batch: bool, own: bool = True, ext: str = ".safetensors") -> None:
    columns = (PIXELS, SOUND, WEIGHT)
    if not own:
        columns = tuple(one._replace(column=one.column.changed(file="rank")) for one in columns)
    files = ("", "pixels", "sound") if own else ("",)
    lake_on_disk(url, slices=Grid(RANKS, MICRO if of_micro_batch else 1, files=files), ext=ext)
    payloads, _ = construct(PayloadSpec(ext, True, 0, 11, of_micro_batch, columns), TASK)
    with Producer(url, producer_id="plan") as producer:
        for step in range(PAIRS):
            producer.append(payloads, position=step)


@pytest.fixture(scope="module", params=[False, True], ids=["ranks", "micro_batches"])
def lakes(request, tmp_path_factory):
    """A lake with three files each, and the same columns in one."""
    directory = tmp_path_factory.mktemp("lakes")
    urls = [(directory / name).as_uri() for name in ("own", "one")]
    for url, own in zip(urls, (True, False), strict=True):
        planned_beside(url, of_micro_batch=request.param, own=own)
    return urls


def items_of(url: str, workers: int = 0, **options) -> list[list[dict]]:
    dataset = StepDataset(url, stop=PAIRS, **options)
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
    dataset = StepDataset(lakes[0], rank=0, mesh=mesh, stop=PAIRS, files=files)
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
    assert sum(needed) * PAIRS <= counts["bytes_fetched"] <= (sum(needed) + 64 * len(needed)) * PAIRS
    assert counts["requests"] <= len(needed) * PAIRS


def test_a_rank_fetches_the_files_ahead_that_it_reads(lakes):
    with Lake(lakes[0], ranks=0, files=()) as lake:
        micro = 0 if lake.micro_batches > 1 else None
        for step in range(2):
            lake.read(step, 0, micro)
        assert lake.files == ("",)
        until(lambda: lake.holds(PAIRS - 1, 0, micro))
        assert not any(lake.holds(step, 0, micro, "pixels") for step in range(PAIRS))
    with Lake(lakes[0], ranks=0) as lake:
        for step in range(2):
            lake.read(step, 0, micro)
        until(lambda: lake.holds(PAIRS - 1, 0, micro, "pixels"))


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
    planned_beside(url, of_micro_batch=False, ext=".tar")
    dataset = StepDataset(url, rank=0, stop=1, files="sound")
    assert {name: type(item) for name, item in dataset[0].items()} == {"": bytes, "sound": bytes}
    dataset.lake.close()
