"""`--steps` and `--wait` on real mounts: the same view on every node, waits that can be killed and hold nobody up."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from realmount import PATIENCE_S, lake_with, make_lake, mounted, payload, until
from torch.utils.data import Dataset

from stepfs_producer import Producer

STEPS = 40
ATTEMPTS = 5  # what takes long because the machine is busy does not take long each time
READ = "import sys; sys.stdout.write(str(len(open(sys.argv[1], 'rb').read())))"


class Steps(Dataset):
    """A map-style dataset as people write it."""

    def __init__(self, directory):
        self.paths = sorted(p for p in directory.iterdir() if p.name.startswith("step-"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, item):
        return (self.paths[item] / "rank-00000.bin").read_bytes()


def reader(path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", READ, str(path)], stdout=subprocess.PIPE, text=True)


def test_mounts_begun_before_during_and_after_the_commits_are_equal(file_url, tmp_path):
    make_lake(file_url)
    half = STEPS // 2
    steps = ("--steps", f"0:{STEPS}")
    with mounted(file_url, tmp_path / "before", *steps) as before:
        seen = [Steps(before.directory)]
        with Producer(file_url, producer_id="p0") as producer:
            for step in range(STEPS):
                producer.append([payload(step, 0), payload(step, 1)], position=step)
                if step == half:
                    producer.flush()
                    with mounted(file_url, tmp_path / "during", *steps) as during:
                        seen.append(Steps(during.directory))
                        names = [path.name for path in seen[1].paths]
                        assert len(during.file(half, 0).read_bytes()) == len(payload(half, 0))
        with mounted(file_url, tmp_path / "after", *steps) as after:
            seen.append(Steps(after.directory))
            assert {len(dataset) for dataset in seen} == {STEPS}
            assert [[p.name for p in dataset.paths] for dataset in seen] == [names] * 3
            assert [seen[0][i] for i in range(STEPS)] == [payload(i, 0) for i in range(STEPS)]
            assert [seen[2][i] for i in range(STEPS)] == [payload(i, 0) for i in range(STEPS)]
            assert not (after.directory / "latest").is_symlink()


@pytest.mark.parametrize("options", [("--steps", "0:100"), ("--wait", "60")])
def test_reading_ahead_of_the_producer_waits_for_it(file_url, tmp_path, options):
    make_lake(file_url)
    with (
        mounted(file_url, tmp_path / "m", *options) as mount,
        Producer(file_url, producer_id="p0") as producer,
    ):
        waiting = [reader(mount.file(step, 1)) for step in range(3)]
        until(lambda: mount.status()["waiting"] == 3, "nobody waits")
        for step in range(3):
            producer.append([payload(step, 0), payload(step, 1)], position=step)
        producer.flush()
        for step, process in enumerate(waiting):
            out, _ = process.communicate(timeout=PATIENCE_S)
            assert int(out) == len(payload(step, 1))


@pytest.mark.parametrize("options", [("--steps", "0:100"), ("--wait", "600")])
def test_waiting_readers_die_within_half_a_second(file_url, tmp_path, options):
    make_lake(file_url)
    with mounted(file_url, tmp_path / "m", *options) as mount:

        def kill_a_reader(number: int) -> float:
            process = reader(mount.file(7, 0))
            until(lambda: mount.status()["waiting"] == 1, "nobody waits")
            began = time.monotonic()
            process.send_signal(number)
            process.wait(timeout=PATIENCE_S)
            took = time.monotonic() - began
            process.stdout.close()
            until(lambda: mount.status()["waiting"] == 0, "a dead reader still waits")
            return took

        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            assert any(kill_a_reader(number) < 0.5 for _ in range(ATTEMPTS)), number


def test_who_waits_with_a_redirection_can_be_killed(file_url, tmp_path):
    """Another process than the one that reads may have opened the file: it is the open that waits."""
    make_lake(file_url)
    with mounted(file_url, tmp_path / "m") as mount:
        process = subprocess.Popen(["sh", "-c", f"exec cat < {mount.directory}/.stepfs/wait/7"])
        until(lambda: mount.status()["waiting"] == 1, "nobody waits")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGTERM
        until(lambda: mount.status()["waiting"] == 0, "a dead reader still waits")


def test_eight_waiting_workers_do_not_delay_a_listing_of_the_root(file_url, tmp_path):
    lake_with(file_url, 3)
    with mounted(file_url, tmp_path / "m", "--steps", "0:50") as mount:

        def listing() -> float:
            began = time.perf_counter()
            assert len(mount.steps()) == 50
            assert mount.file(1, 0).read_bytes() == payload(1, 0)
            return time.perf_counter() - began

        alone = min(listing() for _ in range(20))
        # Two in one directory, where the kernel's lock queues them, the rest each in its own.
        workers = [reader(mount.file(10 + max(0, number - 1), 0)) for number in range(8)]
        try:
            until(lambda: mount.status()["waiting"] >= 7, "nobody waits")
            beside = min(listing() for _ in range(20))
            assert beside < max(3 * alone, 0.05)
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.communicate(timeout=PATIENCE_S)


def test_waiters_of_one_directory_all_die_when_killed(file_url, tmp_path):
    """The kernel holds all but one on the directory's lock, where not even SIGKILL reaches them."""
    make_lake(file_url)
    with mounted(file_url, tmp_path / "m", "--wait", "600") as mount:

        def kill_four() -> float:
            workers = [reader(mount.file(5, 0)) for _ in range(4)]
            until(lambda: mount.status()["waiting"] >= 1, "nobody waits")
            time.sleep(1.0)  # until the others stand in the kernel's queue, which shows nowhere
            began = time.monotonic()
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.communicate(timeout=PATIENCE_S)
            return time.monotonic() - began

        assert any(kill_four() < 1.0 for _ in range(ATTEMPTS))


def test_a_hundred_and_fifty_waiting_requests_starve_nobody(file_url, tmp_path):
    """pyfuse3's default of 99 tasks would: `stat` included."""
    lake_with(file_url, 2)
    with mounted(file_url, tmp_path / "m") as mount:
        threads = [threading.Thread(target=_ignore_errors, args=(mount.wait_for, 10 + n)) for n in range(150)]
        for thread in threads:
            thread.start()
        until(lambda: mount.status()["waiting"] == 150, "they do not wait")
        assert mount.file(1, 0).read_bytes() == payload(1, 0)
        assert len(mount.steps()) == 2
        mount.kill(signal.SIGTERM)  # it ends though all of them wait, and they with it
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads)


def _ignore_errors(function, *arguments):
    with contextlib.suppress(OSError):
        function(*arguments)
