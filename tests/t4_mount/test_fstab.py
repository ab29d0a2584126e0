"""`mount -t stepfs`: mount(8) and the helper, with the flags that keep a lake's bytes from running as anything."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from finished import ran
from realmount import PATIENCE_S, gone, mounted, payload

from stepfs.mount.host import mounts
from stepfs.mount.host.mounts import unmount

HELPER = Path(__file__).parents[2] / "scripts/deploy/mount.stepfs"
INSTALLED = Path("/sbin/mount.stepfs")


@pytest.fixture
def helper():
    """The helper where mount(8) looks for it. The machine has one such place: tests that run at once take turns."""
    directory = os.open(INSTALLED.parent, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    INSTALLED.unlink(missing_ok=True)
    INSTALLED.symlink_to(HELPER)
    yield
    INSTALLED.unlink()
    os.close(directory)


def mount8(tmp_path, *arguments):
    env = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "STEPFS": str(Path(sysconfig.get_path("scripts")) / "stepfs"),  # as /usr/local/bin/stepfs would be
        "STEPFS_LOG_DIR": str(tmp_path / "logs"),
        "STEPFS_CACHE_DIR": str(tmp_path / "cache"),
    }
    return ran(["mount", *arguments], env=env)


def flags_of(directory):
    (line,) = [
        line.split(" ")
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if line.split(" ")[4] == str(directory)
    ]
    separator = line.index("-", 6)
    return set(line[5].split(",")), set(line[separator + 3].split(","))


@pytest.mark.parametrize("through", ["arguments", "fstab"])
def test_mount_8_mounts_and_umount_ends_the_daemon(helper, lake, tmp_path, through):
    directory = tmp_path / "m"
    directory.mkdir()
    options = 'nofail,_netdev,x-systemd.automount,world=4,ranks="0,2-3",no-prime'
    if through == "arguments":
        done = mount8(tmp_path, "-t", "stepfs", lake, str(directory), "-o", options)
    else:
        (tmp_path / "fstab").write_text(f"{lake} {directory} stepfs {options} 0 0\n")
        done = mount8(tmp_path, "--fstab", str(tmp_path / "fstab"), "-a")
        again = mount8(tmp_path, "--fstab", str(tmp_path / "fstab"), "-a")  # knows that it is mounted
        assert (again.returncode, again.stderr) == (0, "")
    try:
        assert (done.returncode, done.stderr) == (0, "")
        assert (directory / "step-000000002/rank-00003.bin").read_bytes() == payload(2, 1)
        config = json.loads((directory / ".stepfs/config.json").read_text())
        assert config["options"]["ranks"] == [0, 2, 3]
        assert [m.directory for m in mounts.mounts()].count(str(directory)) == 1
        subprocess.run(["umount", str(directory)], check=True, timeout=PATIENCE_S)
        gone(config["pid"])
    finally:
        while mounts.mount_at(directory) is not None:
            unmount(directory, lazy=True)


def test_a_failure_is_mount_8s_status_and_one_line(helper, tmp_path):
    (tmp_path / "m").mkdir()
    done = mount8(tmp_path, "-t", "stepfs", (tmp_path / "no lake").as_uri(), str(tmp_path / "m"))
    assert done.returncode == 32
    assert "stepfs init" in done.stderr
    assert mounts.mount_at(tmp_path / "m") is None


@pytest.mark.parametrize("allow_other", [False, True])
def test_the_mount_carries_the_flags_that_keep_it_harmless(lake, tmp_path, allow_other):
    asked = ["--allow-other"] if allow_other else []
    with mounted(lake, tmp_path / "m", *asked) as mount:
        flags, fuse = flags_of(mount.directory)
        assert {"ro", "nosuid", "nodev", "noexec"} <= flags
        assert "default_permissions" in fuse
        assert ("allow_other" in fuse) == allow_other
        for path in [mount.directory, *mount.directory.rglob("*")]:
            if not path.is_symlink():
                assert path.stat().st_mode & 0o7777 == (0o555 if path.is_dir() else 0o444), path
        others = subprocess.run(
            ["cat", str(mount.file(0, 0))], user=65534, group=65534, extra_groups=[], capture_output=True,
            check=False,
        )  # fmt: skip
        if not allow_other:
            assert others.returncode != 0
        assert (
            subprocess.run(["sh", "-c", f"exec {mount.file(0, 0)}"], stderr=subprocess.PIPE, check=False).returncode
            == 126
        )
