"""What a person decided while a mount stands, and what befell its store, outlives the daemon that saw it."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from endings import save
from realmount import change_constants, lake_with, make_lake, mounted, needs_resend, payload, produce, stepfs, until
from succession import kill, replace, replaced

from stepfs import CheckpointHook, ShuffledSteps

pytestmark = pytest.mark.usefixtures("real_daemons")
OFTEN_S = {"stepfs.checkpoints.watch:POLL_S": 0.1, "stepfs.follow.parts:INTERVAL_S": 0.1}
HOWS = pytest.mark.parametrize(
    "how", [pytest.param(kill, marks=needs_resend), pytest.param(replace, marks=pytest.mark.nightly)]
)


def groups(url: str) -> dict[str, list[int]]:
    found = json.loads(said("status", url, "--json"))["groups"]
    return {name: one["kept"] for name, one in found.items()}


def said(*words: str) -> str:
    done = stepfs(*words)
    done.check_returncode()
    return done.stdout


def follow(how, mount, *options):
    return kill(mount) if how is kill else replace(mount, *options)


@HOWS
def test_a_group_that_was_retired_stays_retired(file_url, tmp_path, how):
    lake_with(file_url, 4)
    options = ("--group", "run")
    with mounted(file_url, tmp_path / "m", *options) as mount:
        said("retire-group", file_url, "run")
        follow(how, mount, *options)
        assert groups(file_url) == {}


@HOWS
def test_a_checkpoint_that_was_recorded_by_hand_stays_beside_those_of_a_directory(file_url, tmp_path, monkeypatch, how):
    lake_with(file_url, 10)
    change_constants(monkeypatch, OFTEN_S)
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    options = ("--group", "run", "--checkpoint-dir", str(saved), "--next-step", "N")
    with mounted(file_url, tmp_path / "m", *options) as mount:
        mount.file(9, 0).read_bytes()
        save(saved, 8)
        until(lambda: groups(file_url) == {"run": [8]}, "it is not recorded", every_s=0.2)
        said("checkpoint", file_url, "--group", "run", "4")
        follow(how, mount, *options)
        mount.file(9, 0).read_bytes()
        save(saved, 9)
        until(lambda: 9 in groups(file_url)["run"], "the next daemon watches nothing", every_s=0.2)
        assert groups(file_url) == {"run": [4, 8, 9]}


@HOWS
def test_named_steps_beyond_the_end_of_a_lake_that_was_sealed_meanwhile_stay_shown(file_url, tmp_path, how):
    lake_with(file_url, 3)
    options = ("--steps", "0:6")
    with mounted(file_url, tmp_path / "m", *options, allowed=[""]) as mount:
        said("seal", file_url)
        until(lambda: mount.status()["sealed"], "it does not see the seal")
        follow(how, mount, *options)
        assert mount.file(2, 0).read_bytes() == payload(2, 0)


@pytest.fixture
def put_back(file_url, tmp_path):
    """A lake of eight steps, and a function that puts back a copy of four and commits others behind them."""
    home = Path(file_url.removeprefix("file://"))
    lake_with(file_url, 4)
    shutil.copytree(home, tmp_path / "copy")
    produce(file_url, 4)

    def act(more: int) -> None:
        shutil.rmtree(home)
        shutil.copytree(tmp_path / "copy", home)
        for _ in range(more):
            produce(file_url, 1, size=5000)

    return act


@HOWS
def test_a_mount_shows_one_history(file_url, tmp_path, put_back, how):
    with mounted(file_url, tmp_path / "m", allowed=["another history", "rolled back", "version"]) as mount:
        former = {step: mount.file(step, 0).read_bytes() for step in range(8)}
        put_back(5)
        kill(mount) if how is kill else replaced(mount)  # which may be refused
        shown = dict[int, bytes]()
        for step in range(4, 9):
            with suppress(OSError):
                shown[step] = mount.file(step, 0).read_bytes()
        of_former = {step for step in shown if shown[step] == former.get(step)}
        assert of_former in (set(), set(shown))


def test_a_watched_directory_records_nothing_while_the_lake_has_another_history(
    file_url, tmp_path, monkeypatch, put_back
):
    change_constants(monkeypatch, OFTEN_S)
    saved = tmp_path / "checkpoints"
    saved.mkdir()
    options = ("--group", "run", "--checkpoint-dir", str(saved), "--next-step", "N")
    with mounted(file_url, tmp_path / "m", *options, allowed=["another history"]) as mount:
        mount.file(7, 0).read_bytes()
        put_back(5)
        until(lambda: "another history" in (mount.status()["store"]["trouble"] or ""), "it does not notice")
        save(saved, 6)
        until(lambda: "held back: " in mount.log.read_text(), "nothing is said")
        assert groups(file_url) in ({}, {"run": []})


def test_steps_that_were_reclaimed_stay_away_at_the_next_daemon_and_open_ones_are_read_on(file_url, tmp_path):
    batches = lake_with(file_url, 6)
    options = ("--group", "run")
    with mounted(file_url, tmp_path / "m", *options) as mount, mount.file(1, 0).open("rb") as held:
        assert held.read(10) == batches[1][0][:10]
        said("checkpoint", file_url, "--group", "run", "4")
        until(lambda: len(mount.steps()) == 2, "the group hides nothing")
        said("reclaim", file_url, "--grace", "0")
        replace(mount, *options)
        assert mount.steps() == ["step-000000004", "step-000000005"]
        assert not mount.file(1, 0).exists()
        assert held.read() == batches[1][0][10:]


def test_a_group_that_the_mount_did_not_have_is_registered_by_a_replacement(file_url, tmp_path):
    lake_with(file_url, 4)
    with mounted(file_url, tmp_path / "m", "--group", "run") as mount:
        said("retire-group", file_url, "run")
        replace(mount, "--group", "other")
        assert groups(file_url) == {"other": []}
        said("retire-group", file_url, "other")
        replace(mount, "--group", "other")
        assert groups(file_url) == {}


@HOWS
def test_a_lake_without_a_step_is_served_on(file_url, tmp_path, how):
    make_lake(file_url)
    with mounted(file_url, tmp_path / "m") as mount:
        follow(how, mount)
        batches = produce(file_url, 2)
        mount.wait_for(1)
        assert mount.file(1, 0).read_bytes() == batches[1][0]


@HOWS
@pytest.mark.parametrize("when", ["announced", "ended"])
def test_what_was_decided_about_an_order_outlives_a_daemon_that_ends_at_once(file_url, tmp_path, how, when):
    lake_with(file_url, 20)
    options = ("--group", "run")
    with mounted(file_url, tmp_path / "m", *options) as mount:
        kill_or_replace = (lambda: mount.kill(signal.SIGKILL)) if how is kill else (lambda: replace(mount, *options))
        sampler = ShuffledSteps(mount.directory, first=0, stop=20, seed=7)
        order = list(sampler)
        if when == "ended":
            for step in order:
                mount.file(step, 0).read_bytes()
        kill_or_replace()
        mount.pid = mount.config()["pid"]
        assert mount.status()["order_needs_from"] == (None if when == "ended" else 0)
        if when == "announced":
            for step in order:
                mount.file(step, 0).read_bytes()
        CheckpointHook(mount.directory)(20)


@needs_resend
def test_a_daemon_that_follows_in_another_history_serves_what_is_cached(file_url, tmp_path, put_back):
    with mounted(file_url, tmp_path / "m", "--no-prime", "--prefetch", "0", allowed=["another history"]) as mount:
        former = {step: mount.file(step, 0).read_bytes() for step in (1, 6)}
        sizes = {step: mount.file(step, 1).stat().st_size for step in (0, 7)}
        put_back(5)
        kill(mount)
        assert {step: mount.file(step, 0).read_bytes() for step in former} == former
        for step, size in sizes.items():
            assert mount.file(step, 1).stat().st_size == size
            with pytest.raises(OSError, match="Input/output"):
                mount.file(step, 1).read_bytes()
        assert len(mount.steps()) == 8
        assert not mount.step(8).exists()
        trouble = mount.status()["store"]["trouble"]
        assert "another history: the log has lost version" in trouble
        kill(mount)  # and so does the one after it
        assert {step: mount.file(step, 0).read_bytes() for step in former} == former
        assert mount.status()["store"]["trouble"] == trouble


def test_a_mount_of_another_history_is_not_replaced(file_url, tmp_path, put_back):
    with mounted(file_url, tmp_path / "m", "--no-prime", "--prefetch", "0", allowed=["another history"]) as mount:
        former = mount.file(6, 0).read_bytes()
        put_back(5)
        done = replaced(mount)
        assert (done.returncode, "shows steps that the lake has lost" in done.stderr) == (4, True), done.stderr
        assert mount.config()["pid"] == mount.pid
        assert mount.file(6, 0).read_bytes() == former
