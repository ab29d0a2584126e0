"""kill -9 of a daemon, or of its guardian, whose own threads are inside its mount: readers get errors, and nothing is
left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from realmount import PATIENCE_S, clear, gone, lake_with, make_lake, mounted, payload, until

from stepfs.mount.host import mount_table
from stepfs_producer import Producer

pytestmark = pytest.mark.usefixtures("real_daemons")
SLICES = 64
STEPS = 40
SLICE_BYTES = 16 << 10

# Reads in an order that priming does not foresee, so that READs are pending while pages are stored.
READER = """
import os, random, sys
root, seed = sys.argv[1], int(sys.argv[2])
order = random.Random(seed)
print("reading", flush=True)
while True:
    path = f"{root}/step-{order.randrange(40):09d}/rank-{order.randrange(64):05d}.bin"
    with open(path, "rb") as file:
        file.read()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""


@pytest.fixture
def lake(file_url):
    make_lake(file_url, slices=SLICES)
    with Producer(file_url, producer_id="p0") as producer:
        for step in range(STEPS):
            producer.append([bytes([step]) * SLICE_BYTES] * SLICES, position=step)
    return file_url


def kill_while_priming(lake, directory, seed):
    """One daemon, killed at a moment drawn by `seed`; every reader ends in time and so does the process."""
    with mounted(lake, directory, "--ranks", "0-63", "--memory", "64M", "--no-recover") as mount:
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(directory), str(seed * 10 + number)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for number in range(3)
        ]
        try:
            for reader in readers:
                reader.stdout.readline()
            until(lambda: mount.status()["data"]["primed_files"] > 20, "nothing is primed")
            time.sleep(0.01 * (seed % 17))  # not to wait for something: the moment is what is drawn
            mount.kill(signal.SIGKILL)
            for reader in readers:
                reader.wait(timeout=PATIENCE_S)
            gone(mount.pid)
            with pytest.raises(OSError, match=r"not connected|abort"):  # a thread may still be closing the device
                os.listdir(directory)
        finally:
            for reader in readers:
                reader.kill()
                reader.stdout.close()
            subprocess.run(["umount", "-f", "-l", str(directory)], check=False, capture_output=True)
            for reader in readers:
                reader.wait(timeout=PATIENCE_S)
            clear(directory, None)
    assert mount_table.mount_at(directory) is None


@pytest.mark.parametrize("seed", [0, *(pytest.param(more, marks=pytest.mark.nightly) for more in (2, 4))])
def test_a_killed_daemon_lets_its_readers_go(lake, tmp_path, seed):
    kill_while_priming(lake, tmp_path / "m", seed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_hundred_kills_let_every_reader_go(lake, tmp_path):
    for seed in range(100):
        kill_while_priming(lake, tmp_path / "m", seed)


def test_priming_goes_on_with_the_keeper_that_comes_after_one_that_was_killed(file_url, tmp_path):
    lake_with(file_url, 3)
    with mounted(file_url, tmp_path / "m", "--ranks", "0-1", allowed=["another one is started"]) as mount:
        until(lambda: mount.status()["data"]["primed_files"] == 6, "not primed")
        os.kill(mount.keeper, signal.SIGKILL)
        until(lambda: mount.config()["keeper"] != mount.keeper, "no other keeper")
        mount.keeper = mount.config()["keeper"]
        with Producer(file_url, producer_id="p1") as producer:
            producer.append([payload(3, rank) for rank in range(2)], position=0)
        until(lambda: mount.status()["data"]["primed_files"] == 8, "step 3 is not primed")
        assert mount.file(3, 1).read_bytes() == payload(3, 1)
