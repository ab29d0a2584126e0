"""A poller beside four producers, and readers beside a reclaimer: nothing missing, short, changing, or back again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from realmount import PATIENCE_S, lake_with, make_lake, mounted, payload, stepfs, until

from stepfs.format.ids import SEGMENT_STEPS
from stepfs.mount.host import mount_table
from stepfs_producer import Producer

PRODUCERS, EACH = 3, 15

PRODUCE = """
import sys
from stepfs_producer import Producer
url, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Producer(url, producer_id=name) as producer:
    for number in range(count):
        body = f"{name}:{number};".encode() * (50 + number * 37 % 200)
        producer.append([body, body[::-1]], position=number)
        if number % 5 == 4:
            producer.flush()
"""


def test_a_poller_never_sees_a_gap_or_a_step_that_is_not_whole(s3_url, tmp_path):
    make_lake(s3_url)
    with mounted(s3_url, tmp_path / "m", "--poll", "20ms") as mount:
        producers = [
            subprocess.Popen([sys.executable, "-c", PRODUCE, s3_url, f"tok-{number}", str(EACH)])
            for number in range(PRODUCERS)
        ]
        facts: dict[str, tuple] = {}
        seen, listings = 0, 0
        while seen < PRODUCERS * EACH:
            names = mount.steps()
            listings += 1
            assert names == [f"step-{number:09d}" for number in range(len(names))], "a gap"
            assert len(names) >= seen, "a step went away"
            for name in names[seen:]:
                files = sorted(os.listdir(mount.directory / name))
                assert files == ["rank-00000.bin", "rank-00001.bin"]
                for file in files:
                    path = mount.directory / name / file
                    found = path.stat()
                    data = path.read_bytes()
                    assert len(data) == found.st_size > 0
                    facts[f"{name}/{file}"] = (found.st_ino, found.st_size, found.st_mtime_ns, data)
                assert facts[f"{name}/{files[0]}"][3] == facts[f"{name}/{files[1]}"][3][::-1]
            seen = len(names)
            for name in random.sample(sorted(facts), min(4, len(facts))):
                path = mount.directory / name
                found = path.stat()
                assert (found.st_ino, found.st_size, found.st_mtime_ns, path.read_bytes()) == facts[name]
            assert not any(producer.poll() for producer in producers), "a producer failed"
            time.sleep(0.005)
        assert [producer.wait(60) for producer in producers] == [0] * PRODUCERS
        assert listings > 10
        # Each producer's records, exactly once, in its own order.
        order: dict[str, list[int]] = {}
        for step in range(PRODUCERS * EACH):
            name, _, number = facts[f"step-{step:09d}/rank-00000.bin"][3].partition(b";")[0].decode().partition(":")
            order.setdefault(name, []).append(int(number))
        assert order == {f"tok-{n}": list(range(EACH)) for n in range(PRODUCERS)}
        assert mount.status()["faults"] == 0


def test_a_new_step_is_seen_within_the_poll_interval_by_one_who_waits(file_url, tmp_path):
    make_lake(file_url)
    with (
        mounted(file_url, tmp_path / "m", "--poll", "50ms") as mount,
        Producer(file_url, producer_id="p") as producer,
    ):
        time.sleep(2)  # the follower has backed off by now
        late = []
        for step in range(5):
            woken = []

            def wait(step=step, woken=woken):
                mount.wait_for(step)
                woken.append(time.monotonic())

            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: mount.status()["waiting"] == 1, "nobody waits")
            producer.append([payload(step, 0), payload(step, 1)], position=step)
            producer.flush()
            committed = time.monotonic()
            thread.join(PATIENCE_S)
            late.append(woken[0] - committed)
        assert min(late) < 1  # left to itself it looks every two seconds by now


def test_open_files_stay_readable_and_names_never_come_back(file_url, tmp_path):
    batches = lake_with(file_url, 20)
    with mounted(file_url, tmp_path / "m", "--group", "train") as mount:
        with mount.file(2, 0).open("rb") as held, mount.file(3, 1).open("rb", buffering=0) as half:
            first = half.read(10)
            (mount.directory / "step-000000002").stat()
            done = stepfs("checkpoint", mount.directory, "--group", "train", "10")
            assert done.returncode == 0, done.stderr
            until(lambda: mount.steps()[0] == "step-000000010", "the view does not follow the checkpoint")
            done = stepfs("reclaim", file_url)
            assert done.returncode == 0, done.stderr
            assert held.read() == batches[2][0]
            assert first + half.read(1 << 20) == batches[3][1]
            assert os.fstat(held.fileno()).st_size == len(batches[2][0])
            with pytest.raises(FileNotFoundError):
                mount.file(2, 0).open()
        assert not mount.step(2).exists()
        assert mount.file(10, 0).read_bytes() == batches[10][0]
        assert mount.status()["need"] == 10
        with pytest.raises(FileNotFoundError):
            (mount.directory / ".stepfs/steps/2.json").read_text()
    with mounted(file_url, tmp_path / "plain") as other:  # without a group: what is live is what is shown
        assert other.steps()[0] == "step-000000010"


def test_a_reader_at_the_first_moment_gets_its_step(file_url, tmp_path):
    """Its step is in an index segment that is not loaded. Loads had no home until the guardian ran: EIO."""
    lake_with(file_url, SEGMENT_STEPS + 2, size=20)
    directory = tmp_path / "m"
    over = threading.Event()

    def list_at_once() -> list[str]:
        while mount_table.mount_at(directory) is None:
            assert not over.is_set(), "nothing was mounted"
            time.sleep(0)
        return sorted(os.listdir(directory / "step-000000000"))

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(list_at_once)
        try:
            with mounted(file_url, directory):
                assert reader.result(30) == ["rank-00000.bin", "rank-00001.bin"]
        finally:
            over.set()
