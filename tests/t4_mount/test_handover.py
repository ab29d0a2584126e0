"""A mount made by a privileged helper and served, without any privilege, through `/dev/fd/N`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from finished import ran
from rawmount import mount_with_descriptor
from realmount import PATIENCE_S, STEPFS, gone, payload, stepfs

from stepfs.mount.host import mounts
from stepfs.mount.host.mounts import descriptor_of, unmount

UNPRIVILEGED = [
    shutil.which("setpriv") or "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
]  # fmt: skip


@pytest.fixture
def handed_over(tmp_path):
    """What the helper does: (directory, descriptor); the mount is taken away afterwards."""
    directory = tmp_path / "m"
    descriptor = mount_with_descriptor(directory)
    yield directory, descriptor
    if mounts.mount_at(directory) is not None:
        unmount(directory, lazy=True)


@pytest.mark.parametrize("how", ["--daemon", "--foreground"])
def test_a_daemon_that_may_not_mount_serves_a_mount_that_was_handed_over(lake, tmp_path, handed_over, how):
    directory, descriptor = handed_over
    arguments = ["mount", lake, f"/dev/fd/{descriptor}", how, "--cache-dir", str(tmp_path / "cache")]
    env = {**os.environ, "STEPFS_LOG_DIR": str(tmp_path / "logs")}
    process = subprocess.Popen(
        [*UNPRIVILEGED, *STEPFS, *arguments], pass_fds=(descriptor,), env=env, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(descriptor)  # the helper keeps nothing: the daemon's end is the mount's end
    try:
        if how == "--daemon":
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, said
        assert (directory / "step-000000001/rank-00001.bin").read_bytes() == payload(1, 1)
        assert sorted(os.listdir(directory))[-3:] == [f"step-{step:09d}" for step in range(3)]
        pid = mountinfo_pid(directory)
        assert "CapEff:\t0000000000000000" in Path(f"/proc/{pid}/status").read_text()
        unmount(directory, lazy=False)  # by the helper; the daemon notices and cleans up
        gone(pid)
        assert not (tmp_path / "cache").exists() or os.listdir(tmp_path / "cache") == []
    finally:
        if process.poll() is None and how == "--foreground":
            process.wait(PATIENCE_S)
        process.stderr.close()


def test_sigterm_ends_the_daemon_and_readers_fail(lake, tmp_path, handed_over):
    directory, descriptor = handed_over
    process = subprocess.Popen(
        [*UNPRIVILEGED, *STEPFS, "mount", lake, f"/dev/fd/{descriptor}", "--foreground"],
        pass_fds=(descriptor,),
        stderr=subprocess.DEVNULL,
        env={**os.environ, "STEPFS_CACHE_DIR": str(tmp_path / "cache")},
    )
    os.close(descriptor)
    assert (directory / "step-000000001/rank-00001.bin").read_bytes() == payload(1, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    with pytest.raises(OSError, match=r"not connected|abort"):
        os.listdir(directory)


def test_a_descriptor_that_is_something_else_is_refused(lake, tmp_path):
    with (tmp_path / "x").open("w") as file:
        command = [*STEPFS, "mount", lake, f"/dev/fd/{file.fileno()}"]
        done = ran(command, pass_fds=(file.fileno(),))
    assert (done.returncode, done.stderr.count("\n")) == (4, 1)
    assert "is not an open /dev/fuse" in done.stderr
    assert stepfs("mount", lake, "/dev/fd/987").returncode == 4


def test_only_descriptors_are_taken_for_descriptors(tmp_path):
    assert descriptor_of(tmp_path) is None
    assert [descriptor_of(Path(p)) for p in ("/dev/fd/7", "/dev/fd", "/dev/fd/x", "/dev/fd/7/m")] == [
        7, None, None, None,
    ]  # fmt: skip


def mountinfo_pid(directory):
    return json.loads((directory / ".stepfs/config.json").read_text())["pid"]
