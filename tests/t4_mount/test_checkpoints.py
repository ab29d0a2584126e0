"""A checkpoint, however it is told: what no kept one needs leaves every mount of the group, names, cache and pages."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
from endings import save
from realmount import change_constants, lake_with, mounted, payload, produce, stepfs, until

from stepfs import CheckpointHook, StreamState
from stepfs.data.page_cache import resident_bytes
from stepfs.errors import RefusedError

STEPS, SIZE = 20, 300_000
OFTEN_S = {  # how often a mount looks for checkpoints; the second for other mounts' ones
    "stepfs.checkpoints.watch:POLL_S": 0.1,
    "stepfs.follow.parts:INTERVAL_S": 0.1,
}


@dataclass(frozen=True)
class Trainer:
    """How somebody says that checkpoints came and went: at 10, an older one at 5 as after a rollback, 5 gone again."""

    at_10: Callable[[str, Path, Path], object]
    at_5: Callable[[str, Path, Path], object]
    without_5: Callable[[str, Path, Path], object]


def command(target: str | Path, *arguments: str) -> None:
    stepfs("checkpoint", target, "--group", "run", *arguments).check_returncode()


TRAINERS = {
    "stepfs checkpoint LAKE": Trainer(
        lambda lake, _m, _c: command(lake, "10"),
        lambda lake, _m, _c: command(lake, "5"),
        lambda lake, _m, _c: command(lake, "5", "--drop"),
    ),
    "stepfs checkpoint DIR": Trainer(
        lambda _l, mount, _c: command(mount, "10"),
        lambda _l, mount, _c: command(mount, "5"),
        lambda _l, mount, _c: command(mount, "10", "--keep", "1"),
    ),
    "the hook": Trainer(
        lambda _l, mount, _c: CheckpointHook(mount)(10),
        lambda _l, mount, _c: CheckpointHook(mount)(5),
        lambda _l, mount, _c: CheckpointHook(mount).dropped(5),
    ),
    "a watched directory": Trainer(
        lambda _l, _m, checkpoints: save(checkpoints, 10),
        lambda _l, _m, checkpoints: save(checkpoints, 5),
        lambda _l, _m, checkpoints: shutil.rmtree(checkpoints / "step-5"),
    ),
}


def cached(mount, step: int) -> int | None:
    path = mount.file(step, 0)
    return resident_bytes(path, path.stat().st_size)


@pytest.mark.parametrize(
    "trainer", [
        *(pytest.param(one, marks=pytest.mark.nightly) for one in TRAINERS if one != "a watched directory"),
        "a watched directory",
    ],
)  # fmt: skip
def test_what_no_kept_checkpoint_needs_leaves_every_mount_of_the_group(file_url, tmp_path, monkeypatch, trainer):
    change_constants(monkeypatch, OFTEN_S)
    said = TRAINERS[trainer]
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    lake_with(file_url, STEPS, size=SIZE)
    run = ["--group", "run", "--no-prime", "--prefetch", "0"]
    with (
        mounted(file_url, tmp_path / "a", *run, "--checkpoint-dir", str(checkpoints)) as watching,
        mounted(file_url, tmp_path / "b", *run) as second,
        mounted(file_url, tmp_path / "c", "--group", "other") if trainer == "the hook" else nullcontext() as stranger,
    ):
        group = (watching, second)

        def shown_from(step: int) -> None:
            until(
                lambda: all(len(mount.steps()) == STEPS - step for mount in group),
                f"not every mount shows steps from {step} on",
            )

        for mount in group:
            for step in range(STEPS):
                assert mount.file(step, 0).read_bytes() == payload(step, 0, SIZE)
            assert cached(mount, 9), "pages that can go with their name"
        with second.file(2, 1).open("rb", buffering=0) as held:
            said.at_10(file_url, watching.directory, checkpoints)
            shown_from(10)
            for mount in group:
                until(lambda m=mount: m.status()["known_directories"] <= STEPS - 10 + 1, "names stay")
                with pytest.raises(FileNotFoundError):
                    mount.file(9, 0).open()
                assert mount.status()["need"] == 10
            assert held.readall() == payload(2, 1, SIZE)
        assert stranger is None or len(stranger.steps()) == STEPS

        said.at_5(file_url, watching.directory, checkpoints)
        shown_from(5)
        for mount in group:
            assert cached(mount, 9) == 0, "its pages went with its name"
            assert mount.file(9, 0).read_bytes() == payload(9, 0, SIZE)
        said.without_5(file_url, watching.directory, checkpoints)
        shown_from(10)


def test_a_final_checkpoint_is_refused_while_the_mount_stands_or_recorded_when_it_is_gone(file_url, tmp_path):
    lake_with(file_url, 3)
    with mounted(file_url, tmp_path / "plain") as mount:
        done = stepfs("unmount", mount.directory, "--checkpoint", "3")
        assert (done.returncode, mount.steps() != []) == (4, True)
        assert "without --group" in done.stderr
    url = file_url.replace("lake", "a lake")  # what is advised can be typed, spaces or not
    lake_with(url, 3)
    with mounted(url, tmp_path / "m", "--group", "my run", allowed=["cannot"]) as mount:
        done = stepfs("unmount", mount.directory, "--checkpoint", "4")
        assert (done.returncode, mount.steps() != []) == (2, True)
        assert "only 3 steps are committed" in done.stderr
        with mount.file(0, 0).open("rb"):
            done = stepfs("unmount", mount.directory, "--checkpoint", "3")
            assert (done.returncode, mount.status()["need"]) == (4, 0)
        shutil.move(tmp_path / "a lake/lake.msgpack", tmp_path / "aside")
        done = stepfs("unmount", mount.directory, "--checkpoint", "3")
        shutil.move(tmp_path / "aside", tmp_path / "a lake/lake.msgpack")
        assert done.returncode == 3
        assert "is unmounted, but its checkpoint is not recorded" in done.stderr
        (remedy,) = re.findall(r"`(stepfs checkpoint .*)`", done.stderr)
        assert shlex.split(remedy)[1:] == ["checkpoint", url, "--group", "my run", "3"]
        assert stepfs(*shlex.split(remedy)[1:]).returncode == 0


def test_a_state_of_steps_that_the_lake_has_lost_is_refused_by_a_mount_of_what_it_has(file_url, tmp_path):
    home = Path(file_url.removeprefix("file://"))
    lake_with(file_url, 4)
    shutil.copytree(home, tmp_path / "copy")
    produce(file_url, 4)
    with mounted(file_url, tmp_path / "before") as mount:
        stream, states = StreamState.of_mount(mount.directory), {}
        for stream.next_step in (0, 4, 6, 8):
            states[stream.next_step] = stream.state_dict()
            stream.load_state_dict(states[stream.next_step])
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "copy", home)
    produce(file_url, 3)
    with mounted(file_url, tmp_path / "after", "--group", "run") as mount:
        stream = StreamState.of_mount(mount.directory)
        for step in (0, 4):
            stream.load_state_dict(states[step])
        for step, why in ((6, "is another such step"), (8, "is no such step")):
            with pytest.raises(RefusedError, match=why):
                stream.load_state_dict(states[step])
        assert stream.next_step == 4
        stepfs("checkpoint", mount.directory, "--group", "run", "3").check_returncode()
        stepfs("reclaim", file_url, "--grace", "0").check_returncode()
        until(lambda: mount.status()["first_step"] == 3, "the reclaim")
        stream.next_step = 3
        stream.load_state_dict(stream.state_dict() | {"behind": states[4]["behind"]})  # reclaimed: nobody can tell
