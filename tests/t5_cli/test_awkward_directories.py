"""Commands that messages offer still mean the same when a directory has a space and a quote in its name."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path

import pytest
from lakes import commit, stepfs

from stepfs._internal import control_files
from stepfs.doctor.machine import check_alive, check_directory
from stepfs.errors import RefusedError, StepfsError
from stepfs.mount.host import mount_points
from stepfs.mount.host.mount_points import Health
from stepfs.mount.host.mount_table import FSTYPE, Mounted


@pytest.fixture
def awkward(tmp_path: Path) -> Path:
    return tmp_path / "it's a run"


def offered(text: str) -> list[list[str]]:
    """The words of each command in backquotes, as a shell would split them."""
    return [shlex.split(part.removesuffix("…")) for part in re.findall(r"`([^`]+)`", text)]


def mounted_on(directory: Path) -> Mounted:
    return Mounted(mount_id=1, device="0:99", directory=str(directory), fstype=FSTYPE, source="file:///lake")


def test_a_directory_that_is_absent_or_no_mount(awkward: Path, file_url: str) -> None:
    stepfs("init", file_url, "--slices", 3)
    assert offered(stepfs("mount", file_url, awkward).err) == [["mkdir", "-p", str(awkward)]]
    assert offered(stepfs("status", awkward).err) == [["stepfs", "mount", "LAKE", str(awkward)]]
    finding = check_directory(awkward)
    assert shlex.split(finding.remedy or "") == ["mkdir", "-p", str(awkward)]


def test_a_mount_that_does_not_answer(awkward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_files, "ANSWER_S", 0.05)
    (awkward / ".stepfs").mkdir(parents=True)
    status = awkward / ".stepfs" / "status.json"
    os.mkfifo(status)
    assert offered(stepfs("status", awkward).err) == [["stepfs", "doctor", str(awkward)]]
    os.close(os.open(status, os.O_WRONLY))  # lets the thread that reads it go


def test_a_mount_whose_daemon_is_gone(awkward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = OSError(errno.ENOTCONN, "not connected")
    monkeypatch.setattr(control_files, "answer_within", lambda *_, **__: gone)
    with pytest.raises(StepfsError) as raised:
        control_files.read_status(awkward)
    assert offered(str(raised.value)) == [["stepfs", "mount"], ["stepfs", "unmount", str(awkward)]]


@pytest.mark.parametrize(
    ("health", "commands"),
    [
        (Health.ALIVE, [["stepfs", "unmount"]]),
        (Health.DEAD, [["fusermount3", "-uz"]]),
        (Health.SILENT, [["umount", "-f"], ["umount", "-l"]]),
    ],
)
def test_a_mount_point_in_use(awkward, monkeypatch, health: Health, commands):
    def may_not(_mounted: Mounted) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(mount_points, "mount_at", mounted_on)
    monkeypatch.setattr(mount_points, "check_health", lambda *_: (health, None))
    monkeypatch.setattr(mount_points, "clear_dead", may_not)
    with pytest.raises(RefusedError) as raised:
        mount_points.prepare(awkward)
    [words] = offered(str(raised.value))
    assert " ".join(words) == " || ".join(" ".join([*each, str(awkward)]) for each in commands)


@pytest.mark.parametrize("health", [Health.DEAD, Health.SILENT])
def test_doctor_on_a_mount(awkward: Path, monkeypatch: pytest.MonkeyPatch, health: Health) -> None:
    monkeypatch.setattr("stepfs.doctor.machine.check_health", lambda *_, **__: (health, None))
    finding = check_alive(mounted_on(awkward))
    words = [word for each in offered(finding.remedy or "") for word in each]
    assert words.count(str(awkward)) == 2


def test_a_lake(awkward: Path) -> None:
    awkward.mkdir()
    lake = awkward.as_uri()
    absent = offered(stepfs("ls", lake).err)
    assert absent == [["stepfs", "init", lake]]
    assert stepfs(*absent[0][1:], "--slices", 3).code == 0
    commit(lake, range(2))
    objects = [path for path in awkward.rglob("*") if path.is_file() and "data" in path.parts]
    min(objects, key=str).write_bytes(b"")
    [advice] = stepfs("verify", lake, "--json").document["advice"]
    words = shlex.split(advice.partition(": ")[2])
    assert words[:2] == ["stepfs", "fork"]
    assert words[2] == lake
    fork = stepfs("fork", words[2], f"{lake}/new", *words[4:])
    assert fork.code == 0, fork.err
