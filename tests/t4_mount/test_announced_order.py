"""A trainer in random order that says so: through a real mount, by name alone."""

from __future__ import annotations

import errno
import json
import os
import sys
import time

import json_schemas
import pytest
from finished import ran
from realmount import lake_with, mounted, payload, stepfs

from stepfs import CheckpointHook, ShuffledSteps
from stepfs.announce import announce_file, announce_none, announce_steps
from stepfs.errors import RefusedError, UsageError

STEPS = 700
ATTEMPTS = 3  # a machine that is busy fetches too late for one epoch, not for each


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    url = (tmp_path_factory.mktemp("order") / "lake").as_uri()
    lake_with(url, STEPS, slices=1, size=2000)
    return url


def read(mount, steps, *, pause_s=0.005):
    before = mount.status()["data"]
    for step in steps:
        assert mount.file(step, 0).read_bytes() == payload(step, 0, 2000)
        time.sleep(pause_s)  # a trainer computes
    after = mount.status()["data"]
    return {name: after[name] - before[name] for name in ("hits", "misses", "bytes_fetched")}


def test_a_shuffled_epoch_hits_like_a_sequential_one(lake, tmp_path):
    def hits_alike():
        with mounted(lake, tmp_path / "m", "--poll", "30s", "--no-prime") as mount:
            plain = read(mount, range(150))
        with mounted(lake, tmp_path / "m", "--poll", "30s", "--no-prime") as mount:
            sampler = ShuffledSteps(mount.directory, first=0, stop=STEPS, seed=7)
            shuffled = read(mount, [index for index, _ in zip(sampler, range(150), strict=False)])
            assert mount.status()["order_needs_from"] == 0
        return shuffled["hits"] >= 0.95 * plain["hits"]

    assert any(hits_alike() for _ in range(ATTEMPTS))


def test_a_file_of_step_numbers_and_the_end_of_it(lake, tmp_path):
    steps = list(range(STEPS - 1, 0, -7))
    (tmp_path / "order.txt").write_text("".join(f"{step}\n" for step in steps))
    with mounted(lake, tmp_path / "m", "--poll", "30s", "--no-prime") as mount:
        assert announce_file(mount.directory, tmp_path / "order.txt")
        counts = read(mount, steps)
        assert counts["hits"] >= 0.9 * len(steps)
        assert counts["bytes_fetched"] <= 1.05 * sum(len(payload(step, 0, 2000)) for step in steps)
        assert announce_steps(mount.directory, [1, 2, 3])
        accepted = json.loads((mount.directory / ".stepfs/order/1-none").read_text())
        assert accepted == {"schema": 1, "needed_from": None, "orders": []}
        json_schemas.check("order", accepted)
        assert announce_none(mount.directory)
        with pytest.raises(FileNotFoundError):
            os.stat(mount.directory / ".stepfs/order/1-nonsense")
        assert os.listdir(mount.directory / ".stepfs/order") == []


@pytest.mark.skipif(os.getuid() != 0, reason="gives up root")
@pytest.mark.logs("is not announced")
def test_another_user_reads_and_may_not_say_what_comes_next(lake, tmp_path):
    program = (
        "import os, sys; os.setgid(65534); os.setuid(65534)\n"
        "try: os.stat(sys.argv[1] + '/.stepfs/order/1-none')\n"
        "except OSError as error: print(error.errno)\n"
    )
    tmp_path.chmod(0o755)
    with mounted(lake, tmp_path / "m", "--allow-other") as mount:
        command = [sys.executable, "-c", program, str(mount.directory)]
        done = ran(command, check=True)
        assert done.stdout.strip() == str(errno.EACCES)


def test_a_checkpoint_inside_a_shuffled_epoch_keeps_its_first_step(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--group", "g", "--poll", "30s") as mount:
        hook = CheckpointHook(mount.directory)
        sampler = ShuffledSteps(mount.directory, first=100, stop=110, seed=1)
        steps = [100 + index for index in sampler]
        read(mount, steps[:5])
        with pytest.raises(RefusedError, match="record 100"):
            hook(105)
        for command in (
            ["checkpoint", mount.directory, "--group", "g", 105],
            ["unmount", mount.directory, "--checkpoint", 105],
        ):
            done = stepfs(*command)
            assert (done.returncode, "record 100" in done.stderr) == (4, True), done.stderr
        hook(sampler.next_step)
        read(mount, steps[5:])
        hook(110)


def test_the_mount_says_where_the_order_begins_and_ends(lake, tmp_path):
    """An order of other steps fetches what nobody opens, and no checkpoint could be recorded."""
    with mounted(lake, tmp_path / "m", "--steps", "620:640", "--group", "h") as mount:
        files = sorted(mount.directory.glob("step-*"))
        sampler = ShuffledSteps(mount.directory, seed=3)
        assert sorted(sampler) == list(range(len(files)))
        first, *_ = sampler
        assert mount.status()["order_needs_from"] == sampler.next_step == 620
        assert files[first].name == f"step-{620 + first:09d}"
        for options in ({"stop": 20}, {"first": 0, "stop": 640}, {"stop": 641}, {"first": 640}):
            with pytest.raises(UsageError, match="has steps 620 to 640"):
                ShuffledSteps(mount.directory, **options)
    with mounted(lake, tmp_path / "n") as mount:
        for options in ({}, {"first": 0}):
            with pytest.raises(UsageError, match="give `stop`, and `first`"):
                ShuffledSteps(mount.directory, **options)
        assert len(ShuffledSteps(mount.directory, first=STEPS - 4, stop=STEPS)) == 4


@pytest.mark.logs("is not announced")
def test_a_mount_that_takes_no_hints_is_read_all_the_same(tmp_path):
    (tmp_path / "m").mkdir()
    assert sorted(ShuffledSteps(tmp_path / "m", stop=5)) == [0, 1, 2, 3, 4]
