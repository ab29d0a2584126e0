"""`StepDataset` under torch's DataLoader: the order of steps, the waiting, and that no byte is fetched twice."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from beside import until
from safetensors.torch import save
from shelf import SMALL, commit_on_disk, lake_of, lake_on_disk, payload, seal_on_disk
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset

from stepfs import Lake, ShuffledSteps, StepDataset, StreamState, trace
from stepfs._internal import tracing
from stepfs.errors import ClosedError, CorruptError, NoSuchStepError, ReclaimedError, UsageError, WaitExpiredError
from stepfs.torch import dump
from stepfs_producer import Producer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
STEPS = 50
SIZE = 20_000


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A lake that no test changes."""
    return lake_of(tmp_path_factory.mktemp("lakes"), STEPS, SIZE)


def numbers(items) -> list[int]:
    """The steps of payloads."""
    return [int(bytes(item[:12]).partition(b"/")[0]) for item in items]


class Counting:
    """A decoder that leaves the counts of its process in a file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lake: Lake | None = None

    def __call__(self, view: memoryview) -> bytes:
        assert self.lake is not None
        (self.directory / f"{os.getpid()}").write_text(json.dumps(self.lake.counts()))
        return bytes(view)

    def total(self, name: str) -> int:
        return sum(json.loads(path.read_text())[name] for path in self.directory.iterdir())


def counted(tmp_path, url, **options) -> tuple[StepDataset, Counting]:
    directory = tmp_path / "counts"
    directory.mkdir(exist_ok=True)
    decode = Counting(directory)
    dataset = StepDataset(url, rank=1, decode=decode, memory="192M", **options)
    decode.lake = dataset.lake
    return dataset, decode


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("iterable", [True, False])
def test_workers_take_turns_and_fetch_each_byte_once(tmp_path, url, iterable, batch_size):
    own = batch_size if iterable else None
    dataset, decode = counted(tmp_path, url, start=3, stop=STEPS, iterable=iterable, batch_size=own)
    loader = DataLoader(dataset, batch_size=batch_size, num_workers=3, collate_fn=None if batch_size is None else list)
    found = list(loader) if batch_size is None else [item for batch in loader for item in batch]
    assert numbers(found) == list(range(3, STEPS))
    assert all(item == payload(step, 1, SIZE) for step, item in enumerate(found, 3))
    delivered = (STEPS - 3) * SIZE
    assert decode.total("bytes_delivered") == delivered
    assert delivered <= decode.total("bytes_fetched") <= 1.05 * delivered
    assert decode.total("hits") >= STEPS // 4, "and it is fetched ahead"


def test_an_epoch_of_steps_in_random_order_is_fetched_ahead_and_once(tmp_path, url):
    dataset, decode = counted(tmp_path, url, start=2, stop=STEPS)
    sampler = ShuffledSteps(dataset, seed=7)
    for epoch, position in ((0, 0), (1, 5)):
        sampler.set_epoch(epoch, position=position)
        expected = [item + 2 for item in sampler]
        assert numbers(DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=3)) == expected
    delivered = (2 * (STEPS - 2) - 5) * SIZE
    assert decode.total("bytes_delivered") == delivered
    assert decode.total("bytes_fetched") <= 1.05 * delivered
    assert decode.total("hits") >= STEPS // 2


def test_an_order_nobody_announced_fetches_what_it_reads(tmp_path, url):
    order = [(17 * item + 5) % STEPS for item in range(STEPS)]
    dataset, decode = counted(tmp_path, url, stop=STEPS)
    assert numbers(DataLoader(dataset, sampler=order, batch_size=None, num_workers=3)) == order
    assert decode.total("bytes_fetched") == STEPS * SIZE


def test_without_workers_it_reads_in_this_process(tmp_path, url):
    for iterable in (True, False):
        dataset, decode = counted(tmp_path, url, stop=20, iterable=iterable)
        assert isinstance(dataset, IterableDataset) is iterable
        assert isinstance(dataset, StepDataset)
        assert numbers(DataLoader(dataset, batch_size=None)) == list(range(20))
        assert numbers(dataset) == list(range(20)), "and again"
        dataset.lake.close()
    assert decode.total("bytes_fetched") <= 2.1 * 20 * SIZE


def test_persistent_workers_begin_again(tmp_path, url):
    dataset, decode = counted(tmp_path, url, start=1, stop=STEPS)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert numbers(loader) == list(range(1, STEPS))
    assert decode.total("hits") >= STEPS


def test_the_iterable_style_waits_and_ends_with_a_sealed_lake(file_url):
    lake_on_disk(file_url)
    commit_on_disk(file_url, range(2))
    dataset = StepDataset(file_url, rank=0, memory="192M")
    loader = iter(DataLoader(dataset, batch_size=None, num_workers=3))
    assert numbers([next(loader), next(loader)]) == [0, 1]
    commit_on_disk(file_url, range(2, 4))
    assert numbers([next(loader)]) == [2]
    seal_on_disk(file_url)
    assert numbers(loader) == [3]


def test_the_map_style_has_its_length_before_the_steps_are_there_and_waits_for_them(file_url):
    lake_on_disk(file_url)
    with Lake(file_url) as lake:
        dataset = StepDataset(lake, rank=0, stop=3)
        assert len(dataset) == 3
        threading.Timer(0.3, lambda: commit_on_disk(file_url, range(3))).start()
        assert dataset[2] == payload(2, 0, SMALL)
        assert dataset[-3] == payload(0, 0, SMALL)
        with pytest.raises(IndexError):
            dataset[3]


def test_a_step_that_does_not_come_is_an_error(url):
    dataset = StepDataset(url, rank=0, start=STEPS, stop=STEPS + 5, wait="0.2s")
    with pytest.raises(NoSuchStepError, match=f"step {STEPS} was not committed"):
        assert dataset[0]
    dataset.lake.close()


@pytest.mark.parametrize("kind", [NoSuchStepError, WaitExpiredError, ReclaimedError, CorruptError, ClosedError])
def test_an_error_of_a_worker_arrives_as_what_it_is(kind):
    with pytest.raises(kind) as caught:
        raise kind("step 3 …")
    sent = ExceptionWrapper((kind, caught.value, caught.tb), where="in DataLoader worker process 1")
    with pytest.raises(kind, match=r"worker process 1[^$]*step 3"):
        pickle.loads(pickle.dumps(sent)).reraise()


def test_state_counts_the_steps_that_the_loader_gave(url):
    dataset = StepDataset(url, rank=0, stop=STEPS)
    stream = StreamState.of_lake(dataset.lake)
    for step, item in enumerate(DataLoader(dataset, batch_size=None, num_workers=2), stream.next_step):
        assert numbers([item]) == [step]
        stream.next_step = step + 1
        if stream.next_step == 17:
            break
    resumed = StreamState.of_lake(dataset.lake)
    resumed.load_state_dict(stream.state_dict())
    again = StepDataset(url, rank=0, start=resumed.next_step, stop=STEPS)
    assert numbers(DataLoader(again, batch_size=None, num_workers=3)) == list(range(17, STEPS))


def test_payloads_are_decoded_by_the_lakes_extension(tmp_path):
    array = np.arange(6, dtype="int32").reshape(2, 3)
    file = io.BytesIO()
    np.save(file, array)
    payloads = {
        ".pt": dump({"x": torch.from_numpy(array)}),
        ".npy": file.getvalue(),
        ".safetensors": save({"x": torch.from_numpy(array)}),
        ".bin": array.tobytes(),
    }
    for ext, body in payloads.items():
        url = (tmp_path / ext[1:]).as_uri()
        lake_on_disk(url, slices=1, ext=ext)
        with Producer(url, producer_id="p") as producer:
            producer.append([body], position=0)
        dataset = StepDataset(url, rank=0, stop=1)
        found = dataset[0]
        dataset.lake.close()
        found = found["x"].numpy() if isinstance(found, dict) else found
        if ext == ".bin":
            found = np.frombuffer(found, dtype="int32").reshape(2, 3)
        assert (found == array).all()


def test_a_dataset_travels_to_a_spawned_worker(url):
    for iterable in (True, False):
        dataset = StepDataset(url, rank=1, stop=7, iterable=iterable)
        copy = pickle.loads(pickle.dumps(dataset))
        assert type(copy) is type(dataset)
        assert numbers(copy) == list(range(7))
        copy.lake.close()


def test_what_cannot_be_read_is_refused(url):
    for options in (
        {"rank": 2},
        {"rank": -1},
        {"start": -1},
        {"start": 9, "stop": 8},
        {"batch_size": 0},
        {"iterable": False},
    ):
        with pytest.raises(UsageError):
            StepDataset(url, **({"rank": 0} | options))


def test_a_subclass_is_told_what_to_do_instead(url):
    class Mine(StepDataset):
        pass

    with pytest.raises(UsageError, match="pass `decode`, or hold one"):
        Mine(url, rank=0)


def test_options_of_a_lake_are_given_to_the_lake(url):
    with Lake(url) as lake, pytest.raises(UsageError, match="belong to the Lake"):
        StepDataset(lake, rank=0, memory="1G")


def test_a_mistake_is_told_in_the_words_of_python_and_from_few_frames(url):
    for options, words in [({"rank": 7}, "there is no rank 7"), ({"rank": 0, "world": 7}, "world=7")]:
        with pytest.raises(UsageError, match=words) as caught:
            StepDataset(url, **options)
        assert "--" not in str(caught.value)
        assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3
    with Lake(url) as lake, pytest.raises(NoSuchStepError) as late:
        lake[STEPS]
    assert "trio" not in "".join(traceback.format_tb(late.value.__traceback__))


def test_the_workers_that_a_loader_forks_are_in_the_trace(url, tmp_path):
    """Each with its own process; what it has handed on is there, and it does so within a second."""
    dataset = StepDataset(url, rank=0, stop=5)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=bytes, persistent_workers=True)
    with trace(tmp_path / "t.json.gz"):
        assert len(list(loader)) == 5
        spool = tracing.ring.spool  # type: ignore[union-attr]
        until(lambda: "".join(part.read_text() for part in spool.iterdir()).count("read step") == 5)
    assert not spool.exists()
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    reads = {event["name"]: event["pid"] for event in events if event["name"].startswith("read step")}
    assert set(reads) == {f"read step {step}" for step in range(5)}
    assert len(set(reads.values()) - {os.getpid()}) == 2


def test_a_worker_that_outlives_the_trace_keeps_no_events(url, tmp_path):
    dataset = StepDataset(url, rank=0, stop=5)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, collate_fn=is_traced, persistent_workers=True)
    with trace(tmp_path / "t.json"):
        assert all(loader)
    until(lambda: not any(loader))


def is_traced(_payload: object) -> bool:
    return tracing.ring is not None
