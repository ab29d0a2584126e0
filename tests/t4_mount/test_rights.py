"""What a mount needs of its container, of its unit and of who made it: a line that says what is missing, or it works."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest
from finished import ran
from rawmount import mount_with_descriptor
from realmount import PATIENCE_S, STEPFS, clear, gone, lake_with, make_lake, mounted, payload, stepfs

from stepfs.mount.host import mount_table
from stepfs.mount.host.mount_points import unmount
from stepfs.mount.host.mount_table import descriptor_of

HIDE = """
mount -t tmpfs none /dev
for name in null random urandom; do touch "/dev/$name"; done
mknod -m 666 /dev/null2 c 1 3 && mv /dev/null2 /dev/null
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes namespaces")
@pytest.mark.parametrize("command", ["mount", "doctor"])
def test_without_the_device_the_line_names_it(file_url, tmp_path, command):
    make_lake(file_url)
    (tmp_path / "mount").mkdir()
    words = [command, file_url, *([str(tmp_path / "mount")] if command == "mount" else [])]
    done = ran(
        ["unshare", "--mount", "--propagation=private", "sh", "-euc", HIDE, "sh", *STEPFS, *words],
        env={**os.environ, "STEPFS_LOG_DIR": str(tmp_path / "logs")},
    )
    assert "--device /dev/fuse" in done.stdout + done.stderr
    assert done.returncode == (4 if command == "mount" else 1)
    assert len(done.stderr.splitlines()) == 1


SCRIPT = """
set -e
mount --make-rprivate /
mount --bind / /
mount -o remount,ro,bind /
cd /
! touch /tmp/probe 2>/dev/null
unset TMPDIR XDG_CACHE_HOME XDG_STATE_HOME XDG_RUNTIME_DIR
"$@" --foreground &
for i in $(seq 300); do [ -e "$DIR/.stepfs/status.json" ] && break; sleep 0.1; done
cat "$DIR/step-000000001/rank-00001.bin"
kill -INT $!
wait $! || [ $? = 130 ]
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="root makes namespaces")
def test_no_writable_file_system_is_needed(tmp_path):
    url, directory = (tmp_path / "lake").as_uri(), tmp_path / "m"
    lake_with(url, 2)
    directory.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", *STEPFS, "mount", url, str(directory)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "DIR": str(directory)},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == payload(1, 1)


UNIT = Path(__file__).parents[2] / "scripts/deploy/stepfs@.service"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a unit of the system's manager runs as root")


def kept() -> list[str]:
    (line,) = [li for li in UNIT.read_text().splitlines() if li.startswith("CapabilityBoundingSet=")]
    return [name.removeprefix("CAP_").lower() for name in line.partition("=")[2].split()]


def sandboxed(capabilities: list[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    bounds = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    taken = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={bounds}"]
    return ran([*taken, *STEPFS, *map(str, arguments)])


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A lake and a mount point in a directory of another user, closed for everybody else."""
    directory = tmp_path / "theirs"
    (directory / "mount").mkdir(parents=True)
    url = (directory / "lake").as_uri()
    batches = lake_with(url, 3)
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, 12345, 12345)
    directory.chmod(0o700)
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    yield url, directory / "mount", batches
    clear(directory / "mount", None)


def test_a_mount_serves_unmounts_and_records_under_the_units_capabilities(theirs, tmp_path):
    url, directory, batches = theirs
    cache = ["--cache-dir", tmp_path / "cache", "--cache-size", "8M"]
    done = sandboxed(kept(), "mount", url, directory, "--group", "run", *cache)
    assert done.returncode == 0, done.stderr
    config = json.loads((directory / ".stepfs/config.json").read_text())
    (bounding,) = [
        line.split()[1]
        for line in Path(f"/proc/{config['pid']}/status").read_text().splitlines()
        if line.startswith("CapBnd:")
    ]
    assert int(bounding, 16).bit_count() == len(kept())
    assert config["kernel"]["read_ahead_kb"] == 4096
    steps = sorted(directory.glob("step-*"))
    assert [[path.read_bytes() for path in sorted(step.iterdir())] for step in steps] == batches
    ended = sandboxed(kept(), "unmount", directory, "--checkpoint", "2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(stepfs("status", url, "--json").stdout)["groups"]["run"]["need"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("missing", "line"), [("sys_admin", "--cap-add SYS_ADMIN"), ("dac_override", "Permission denied")]
)
def test_each_of_them_is_needed(theirs, missing, line):
    url, directory, _ = theirs
    left = [name for name in kept() if name != missing]
    done = sandboxed(left, "mount", url, directory, "--group", "run")
    assert done.returncode not in {0, 2}
    assert line in done.stderr
    said = [line for line in done.stderr.splitlines() if "new group 'run'" not in line]
    assert len(said) == 1


UNPRIVILEGED = [
    shutil.which("setpriv") or "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
]  # fmt: skip


@pytest.fixture
def handed_over(tmp_path):
    """What the helper does: (directory, descriptor); the mount is taken away afterwards."""
    directory = tmp_path / "m"
    descriptor = mount_with_descriptor(directory)
    yield directory, descriptor
    if mount_table.mount_at(directory) is not None:
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
        assert config["options"]["ranks"] == "0,2,3"
        assert [m.directory for m in mount_table.mounts()].count(str(directory)) == 1
        subprocess.run(["umount", str(directory)], check=True, timeout=PATIENCE_S)
        gone(config["pid"])
    finally:
        while mount_table.mount_at(directory) is not None:
            unmount(directory, lazy=True)


def test_a_failure_is_mount_8s_status_and_one_line(helper, tmp_path):
    (tmp_path / "m").mkdir()
    done = mount8(tmp_path, "-t", "stepfs", (tmp_path / "no lake").as_uri(), str(tmp_path / "m"))
    assert done.returncode == 32
    assert "stepfs init" in done.stderr
    assert mount_table.mount_at(tmp_path / "m") is None


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
