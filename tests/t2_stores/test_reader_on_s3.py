"""A lake on S3 read without a mount, in this process, in a fork of it, and in the workers of a DataLoader."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trio
from torch.utils.data import DataLoader

from stepfs import Lake, StepDataset
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store
from stepfs_producer import Producer

STEPS = 12


def payload(step: int) -> bytes:
    return b"%04d" % step * 5000


@pytest.fixture
def url(s3_url: str) -> str:
    async def make() -> None:
        store = open_store(s3_url)
        await create_lake(store, slices=1, ext=".bin")
        await store.aclose()

    trio.run(make)
    with Producer(s3_url, producer_id="p") as producer:
        for step in range(STEPS):
            producer.append([payload(step)], position=step)
    return s3_url


def test_a_first_read_imports_little(url: str) -> None:
    """Each takes 15 to 120 ms of CPU before the first bytes."""
    program = (
        f"import sys; from stepfs import Lake\nwith Lake({url!r}, ranks=0, group='g') as lake: lake.read(3, 0)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert {"boto3", "trio"} <= loaded
    assert not loaded & {"typer", "rich", "numpy", "pyfuse3", "prometheus_client", "torch"}


def test_a_process_and_its_forks_have_connections_of_their_own(url: str) -> None:
    with Lake(url, ranks=0) as lake:
        assert [lake[step][0] for step in range(4)] == [payload(step) for step in range(4)]
        children = []
        for child in range(3):
            pid = os.fork()
            if not pid:
                found = [lake[step][0] == payload(step) for step in range(child, STEPS)]
                os._exit(0 if all(found) else 1)
            children.append(pid)
        assert [lake[step][0] for step in range(STEPS)] == [payload(step) for step in range(STEPS)]
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_of_a_loader_read_a_bucket_in_the_order_of_steps(url: str) -> None:
    dataset = StepDataset(url, rank=0, stop=STEPS, iterable=True)
    assert list(DataLoader(dataset, batch_size=None, num_workers=3)) == [payload(step) for step in range(STEPS)]
