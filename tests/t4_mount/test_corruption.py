"""Whatever rots in a lake, the daemon lives, one file is EIO and the others are right; a new mount works or says why."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import rottenlake
from realmount import clear, lake_with, mounted, payload, running, stepfs, until

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.format.snapshot import place_of
from stepfs.mount.host import mount_table
from stepfs_producer import Producer

HOW = ["flip", "truncate", "delete"]
FRESH_MOUNTS = [
    3,
    pytest.param(8, marks=pytest.mark.nightly),
]  # per way of rotting; each is two processes and more
# Not in the segment, and known to the snapshot: a commit that is gone ends the lake, as a reader sees it, before it.
WELL = SEGMENT_STEPS + 2


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rot") / "intact"
    rottenlake.build(directory)
    return directory


@pytest.fixture
def lake(intact, tmp_path):
    rottenlake.copy(intact, tmp_path / "lake")
    yield tmp_path / "lake"
    clear(tmp_path / "m", None)


def read(mount, step):
    """The bytes of a step's file, or the errno of trying."""
    try:
        return mount.file(step, 0).read_bytes()
    except OSError as error:
        return error.errno


def step_of(key):
    """The step of a data object: its producer numbered them alike."""
    return int(Path(key).name.split("-")[1])


@pytest.mark.parametrize("how", HOW)
def test_a_mount_lives_through_the_rot_of_every_object(lake, tmp_path, how):
    options = ["--no-prime", "--prefetch", "0", "--poll", "20ms"]
    with mounted(lake.as_uri(), tmp_path / "m", *options, allowed=["step ", "cannot follow", "answers again"]) as mount:
        chance = random.Random(how)
        kinds = rottenlake.objects(lake)
        healthy = list(range(rottenlake.FIRST, rottenlake.STEPS))
        hurt = []
        for key, beside in zip(kinds["data"][::2], healthy[1::2], strict=True):
            step = step_of(key)
            body = rottenlake.spoil(lake / key, how, chance)
            found = read(mount, step)
            # A bit in the padding, an end in the index: the slice itself may be whole. Never a mixture.
            assert found == errno.EIO or (how != "delete" and found == rottenlake.payload(step)), key
            hurt += [step] if found == errno.EIO else []
            assert read(mount, beside) == rottenlake.payload(beside)  # for the first time, too
            rottenlake.restore(lake / key, body)
        assert hurt
        for key in (key for kind in rottenlake.KINDS for key in kinds[kind] if kind != "data"):
            body = rottenlake.spoil(lake / key, how, chance)
            mount.wait_for(rottenlake.STEPS - 1)
            assert len(mount.steps()) == len(healthy)
            assert (mount.directory / ".stepfs/metrics").read_text()
            rottenlake.restore(lake / key, body)
        for step in healthy:  # what was restored is read again
            assert read(mount, step) == rottenlake.payload(step)
        status = mount.status()
        assert (status["faults"], running(mount.pid)) == (0, True)
        assert stepfs("verify", lake.as_uri()).returncode == 0
        with_news = rottenlake.STEPS
        produce_more(lake.as_uri())
        mount.wait_for(with_news)  # it still follows
        assert read(mount, with_news) == rottenlake.payload(with_news)


def produce_more(url):

    with Producer(url, producer_id="p") as producer:
        producer.append([rottenlake.payload(rottenlake.STEPS)], position=rottenlake.STEPS)


@pytest.mark.parametrize("count", FRESH_MOUNTS)
@pytest.mark.parametrize("how", HOW)
def test_a_new_mount_of_a_rotten_lake_serves_or_says_why_in_one_line(lake, tmp_path, how, count, monkeypatch):
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chance = random.Random(f"fresh {how}")
    kinds = rottenlake.objects(lake)
    victims = [keys[-1] for keys in kinds.values()] + kinds["log"]
    if how == "delete":  # a log that ends before WELL cannot be told from one that was never longer
        victims = [key for key in victims if key not in rottenlake.tail_up_to(lake, Step(WELL))]
    (tmp_path / "m").mkdir()
    for key in chance.sample(victims, count):
        body = rottenlake.spoil(lake / key, how, chance)
        done = stepfs("mount", lake.as_uri(), tmp_path / "m", "--group", "g")
        if done.returncode == 0:
            file = tmp_path / f"m/step-{WELL:09d}/rank-00000.bin"
            assert file.read_bytes() == rottenlake.payload(WELL), key
            assert stepfs("unmount", tmp_path / "m").returncode == 0
        else:
            assert done.returncode in {3, 4, 5}, f"{key}: {done.stderr}"
            assert done.stderr.count("\n") == 1, done.stderr
            assert "unexpected" not in done.stderr
        assert mount_table.mount_at(tmp_path / "m") is None
        assert os.listdir(tmp_path / "m") == []
        rottenlake.restore(lake / key, body)
    until(lambda: not any((tmp_path / "cache").rglob("lock")), "a cache was left behind")


def test_a_rotten_entry_of_the_index_concerns_its_own_step_alone(lake, tmp_path):
    """The mount starts without it, and needs it when that step is opened."""
    (key,) = rottenlake.objects(lake)["index"]
    with mounted(lake.as_uri(), tmp_path / "m", "--no-prime", "--prefetch", "0", allowed=[key]) as mount:
        body = bytearray((lake / key).read_bytes())
        body[place_of(Step(rottenlake.FIRST), 1) + 20] ^= 1
        sound = rottenlake.spoil(lake / key, "delete", random.Random(1))
        (lake / key).write_bytes(body)
        assert read(mount, rottenlake.FIRST) == errno.EIO
        for step in (SEGMENT_STEPS - 1, rottenlake.STEPS - 1):
            assert read(mount, step) == rottenlake.payload(step)
        assert key in mount.log.read_text()
        assert mount.status()["faults"] == 0
        rottenlake.restore(lake / key, sound)
        assert read(mount, rottenlake.FIRST) == rottenlake.payload(rottenlake.FIRST)


def test_a_damaged_slice_is_eio_for_that_file_alone(file_url, tmp_path):
    lake_with(file_url, 4)
    allowed = ["step 2"]
    with mounted(file_url, tmp_path / "m", "--no-prime", "--prefetch", "0", allowed=allowed) as mount:
        facts = json.loads((mount.directory / ".stepfs/steps/2.json").read_text())
        path = Path(urlsplit(file_url).path) / facts["object"]
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[facts["slices"][1]["offset"] + 7] ^= 1
        path.write_bytes(data)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error") as caught:
                mount.file(2, 1).read_bytes()
            assert caught.value.errno == errno.EIO
        assert facts["object"] in mount.log.read_text()
        assert mount.file(2, 0).read_bytes() == payload(2, 0)
        for step in (0, 1, 3):
            assert [mount.file(step, rank).read_bytes() for rank in (0, 1)] == [
                payload(step, 0),
                payload(step, 1),
            ]
        assert mount.status()["faults"] == 0


def test_a_steps_facts_agree_with_the_files(file_url, tmp_path):
    batches = lake_with(file_url, 3)
    with mounted(file_url, tmp_path / "m") as mount:
        every = [json.loads((mount.directory / f".stepfs/steps/{n}.json").read_text()) for n in range(3)]
        facts = every[1]
        assert (facts["step"], facts["producer"], facts["epoch"]) == (1, "p0", 1)
        assert [s["length"] for s in facts["slices"]] == [len(data) for data in batches[1]]
        (*_, last) = [one["step"] for one in every if one["version"] == facts["version"]]
        assert facts["position"] == last  # of its commit, which usually published steps 0 to 2
        raw = (Path(urlsplit(file_url).path) / facts["object"]).read_bytes()
        for entry, data in zip(facts["slices"], batches[1], strict=True):
            assert raw[entry["offset"] :][: entry["length"]] == data
        assert facts["time"] == pytest.approx(mount.step(1).stat().st_mtime)


def test_many_threads_read_many_files_at_once(s3_url, tmp_path):
    batches = lake_with(s3_url, 8, slices=4, size=300_000)
    with mounted(s3_url, tmp_path / "m") as mount:
        wrong = []

        def read(number: int) -> None:
            for turn in range(8):
                step, rank = (turn * 5 + number) % 8, number % 4
                if mount.file(step, rank).read_bytes() != batches[step][rank]:
                    wrong.append((step, rank))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert mount.status()["faults"] == 0
