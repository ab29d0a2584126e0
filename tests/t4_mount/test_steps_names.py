"""Under `--steps` names are the same on every node at once; only opening waits, and what is opened has its true size."""

from __future__ import annotations

import glob
import mmap
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from finished import ran
from realmount import PATIENCE_S, lake_with, mounted, payload, stepfs, until

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
