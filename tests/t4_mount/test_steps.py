"""Under `--steps` names are the same on every node at once; only opening waits, and what is opened has its true size."""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from finished import ran
from forked import Forked
from realmount import PATIENCE_S, lake_with, make_lake, mounted, payload, stepfs, until
from torch.utils.data import Dataset

from stepfs_producer import Producer

AT_ONCE_S = 20.0  # on a machine that is busy; each of the thirty names used to take seconds
SIZE = 3000


@pytest.fixture
def lake(file_url):
    lake_with(file_url, 2)
    return file_url


def commit_one_more(lake, step):
    with Producer(lake, producer_id="p0") as producer:
        producer.append([payload(step, index) for index in range(2)], position=step)


def test_glob_gives_equal_lists_at_once_on_two_nodes(lake, tmp_path):
    with (
        mounted(lake, tmp_path / "a", "--steps", "0:30", "--wait", "60") as one,
        mounted(lake, tmp_path / "b", "--steps", "0:30") as other,
    ):
        began = time.monotonic()
        lists = []
        for mount in (one, other, one, other):
            found = sorted(glob.glob(f"{mount.directory}/step-*/rank-00000.bin"))
            lists.append([os.path.relpath(path, mount.directory) for path in found])
        assert lists[0] == [f"step-{step:09d}/rank-00000.bin" for step in range(30)]
        assert lists == [lists[0]] * 4
        assert time.monotonic() - began < AT_ONCE_S


def test_names_and_attributes_of_steps_to_come_are_answered_at_once(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--steps", "0:10") as mount:
        began = time.monotonic()
        assert mount.file(7, 1).exists()
        assert mount.file(7, 1).stat().st_size == 0
        assert not mount.file(7, 2).exists()  # there is no such rank
        assert sorted(os.listdir(mount.step(7))) == ["rank-00000.bin", "rank-00001.bin"]
        assert not mount.file(10, 0).exists()  # nor such a step
        found = ran(["find", str(mount.directory), "-name", "rank-*"], check=True)
        assert len(found.stdout.split()) == 20
        assert time.monotonic() - began < AT_ONCE_S
        commit_one_more(lake, 2)
        mount.wait_for(2)
        assert mount.file(2, 1).stat().st_size == len(payload(2, 1))


def test_steps_behind_a_checkpoint_keep_their_names_so_that_a_data_set_keeps_its_length(lake, tmp_path):
    """A trainer that resumes makes its data set again: a shorter list would give every index another file."""

    def globbed():
        return sorted(glob.glob(f"{mount.directory}/step-*/rank-*.bin"))

    with mounted(lake, tmp_path / "m", "--steps", "0:4", "--group", "g") as mount:
        before = globbed()
        held = mount.file(0, 0).open("rb")
        assert held.read() == payload(0, 0)
        assert stepfs("checkpoint", lake, "--group", "g", "--new-group", "2").returncode == 0
        until(lambda: mount.status()["need"] == 2, "the checkpoint does not arrive")
        assert globbed() == before
        assert len(before) == 4 * 2
        assert sorted(os.listdir(mount.step(1))) == ["rank-00000.bin", "rank-00001.bin"]
        assert mount.file(1, 0).stat().st_size == 0
        assert not mount.file(1, 2).exists()  # there is no such rank
        with pytest.raises(FileNotFoundError):
            mount.file(1, 0).read_bytes()
        assert [os.path.getsize(path) for path in before[:2]] == [len(payload(0, 0)), 0], "an open file is whole"
        assert os.pread(held.fileno(), SIZE, 0) == payload(0, 0)
        held.close()
    with mounted(lake, tmp_path / "m", "--steps", "0:4", "--group", "g") as mount:
        assert globbed() == before


READERS = {
    "read": "open(path, 'rb').read()",
    "pread": "os.pread(os.open(path, os.O_RDONLY), 1 << 20, 0)",
    "readinto": "(b := bytearray(1 << 16), b[:open(path, 'rb', buffering=0).readinto(b)])[1]",
    "mmap": "(f := open(path, 'rb'), bytes(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)))[1]",
    "memmap": "__import__('numpy').memmap(path, 'u1', 'r').tobytes()",
    "lseek": "(f := os.open(path, os.O_RDONLY), os.pread(f, os.lseek(f, 0, os.SEEK_END), 0))[1]",
    "fstat": "(f := os.open(path, os.O_RDONLY), os.pread(f, os.fstat(f).st_size, 0))[1]",
    "O_DIRECT": "direct(path)",
    "splice": "spliced(path)",
    "sendfile": "sent(path)",
}
PRELUDE = """
import mmap, os, sys
path = sys.argv[1]
def direct(path):
    buffer = mmap.mmap(-1, 1 << 16)
    got = os.preadv(os.open(path, os.O_RDONLY | os.O_DIRECT), [buffer], 0)
    return buffer[:got]
def spliced(path):
    source, (end, into) = os.open(path, os.O_RDONLY), os.pipe()
    got = os.splice(source, into, 1 << 15)
    return os.read(end, 1 << 16) if got else b""
def sent(path):
    source, (end, into) = os.open(path, os.O_RDONLY), os.pipe()
    got = os.sendfile(into, source, 0, 1 << 15)
    return os.read(end, 1 << 16) if got else b""
os.path.exists(path), os.path.getsize(path)
sys.stdout.write("asked\\n")
sys.stdout.flush()
"""


def test_every_kind_of_reader_that_opened_before_the_commit_gets_the_true_bytes(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--steps", "0:10") as mount:
        path = mount.file(2, 1)
        readers = {
            how: subprocess.Popen(
                [sys.executable, "-c", f"{PRELUDE}sys.stdout.buffer.write({code})", str(path)],
                stdout=subprocess.PIPE,
            )
            for how, code in READERS.items()
        }
        for process in readers.values():
            assert process.stdout.readline() == b"asked\n"
        until(lambda: mount.status()["waiting"] == len(readers), "they do not wait")
        commit_one_more(lake, 2)
        got = {how: process.communicate(timeout=PATIENCE_S)[0] for how, process in readers.items()}
        assert {how: data == payload(2, 1) for how, data in got.items()} == dict.fromkeys(READERS, True)


def test_splice_after_the_commit_of_every_awkward_size(lake, tmp_path):
    bodies = [(bytes(range(1, 256)) * 33)[:size] for size in (0, 1, 4095, 4096, 4097, 8193)]
    with mounted(lake, tmp_path / "m", "--steps", "0:10") as mount:
        places = [os.open(mount.file(step, 1), os.O_PATH) for step in range(2, 8)]
        with Producer(lake, producer_id="p0") as producer:
            for step, body in enumerate(bodies, 2):
                producer.append([b"x", body], position=step)
        mount.wait_for(7)
        for place, body in zip(places, bodies, strict=True):
            source = os.open(f"/proc/self/fd/{place}", os.O_RDONLY)
            end, into = os.pipe()
            assert os.splice(source, into, 1 << 15) == len(body)
            os.close(into)
            with os.fdopen(end, "rb") as spliced:
                assert spliced.read() == body
            assert os.pread(source, 1 << 15, 0) == body
            os.close(source)
            os.close(place)


def test_a_mapping_of_a_file_that_was_looked_up_before_its_commit(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--steps", "0:10") as mount:
        assert mount.file(2, 0).stat().st_size == 0
        commit_one_more(lake, 2)
        assert np.memmap(mount.file(2, 0), np.uint8, "r").tobytes() == payload(2, 0)
        with mount.file(2, 1).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert bytes(mapped) == payload(2, 1)


def test_steps_beyond_the_end_of_a_sealed_lake_are_refused(lake, tmp_path):
    stepfs("seal", lake).check_returncode()
    (tmp_path / "m").mkdir()
    refused = stepfs("mount", lake, tmp_path / "m", "--steps", "0:3")
    assert refused.returncode == 4
    assert "sealed and has 2 steps" in refused.stderr
    assert "--steps 0:2" in refused.stderr
    with mounted(lake, tmp_path / "m", "--steps", "0:2") as mount:
        assert mount.file(1, 1).read_bytes() == payload(1, 1)


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


def test_a_lake_that_a_producer_makes_a_little_later_is_waited_for(file_url, tmp_path):
    (tmp_path / "mnt").mkdir()
    expired = stepfs("mount", file_url, tmp_path / "mnt", "--wait-for-lake", "10ms")
    assert (expired.returncode, expired.stderr.count("is not a lake")) == (3, 1)
    with Forked("stepfs", "mount", file_url, tmp_path / "mnt", "--wait-for-lake", "300") as mounting:
        assert "is no lake yet; waiting up to 300 s for it" in mounting.stderr.readline()
        make_lake(file_url)
        assert mounting.wait(timeout=PATIENCE_S) == 0
    stepfs("unmount", tmp_path / "mnt").check_returncode()
