"""A mount ends whoever uses it, or stays exactly as it was; every bad beginning says one line and its exit code."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import forked
import pytest
import servers
import trio
from endings import ENDINGS, assert_nothing_is_left, nodes_of, processes_that_name, save
from finished import ran
from forked import Forked
from lakework import list_groups
from realmount import PATIENCE_S, STEPFS, clear, gone, mounted, open_files, payload, running, stepfs, until

from stepfs._internal.control_files import answer_within
from stepfs.doctor import machine
from stepfs.lake.identity import open_lake
from stepfs.mount.host import mount_table
from stepfs.mount.logs import LOG_BYTES_MAX
from stepfs.mount.unmount import unmount_and_wait
from stepfs.store.opening import open_store


@pytest.mark.parametrize(
    "ending", ["SIGTERM", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("SIGINT", "umount -l"))]
)
def test_nothing_is_left_though_a_file_is_open_and_a_reader_waits(lake, tmp_path, ending):
    with mounted(lake, tmp_path / "m", "--wait", "600") as mount:
        code = "import os, sys; os.chdir(sys.argv[1]); open(sys.argv[2])"
        waiter = subprocess.Popen(
            [sys.executable, "-c", code, str(mount.step(0)), str(mount.file(9, 0))], stderr=subprocess.DEVNULL
        )
        until(lambda: mount.status()["waiting"] == 1, "nobody waits")
        with mount.file(0, 0).open("rb"):
            ENDINGS[ending](mount)
            assert_nothing_is_left(mount)
        assert waiter.wait(timeout=PATIENCE_S) != 0  # it gets an error instead of waiting for ever


def test_a_busy_mount_is_left_exactly_as_it_was(lake, tmp_path):
    with mounted(lake, tmp_path / "m") as mount:
        with mount.file(0, 0).open("rb") as file:
            done = stepfs("unmount", mount.directory)
            assert done.returncode == 4
            assert "busy" in done.stderr
            assert str(os.getpid()) in done.stderr
            assert file.read() == payload(0, 0)
        assert mount.steps()
        assert stepfs("unmount", mount.directory).returncode == 0
        assert stepfs("unmount", mount.directory).returncode == 3


def test_a_reader_in_another_mount_namespace_keeps_the_mount(lake, tmp_path):
    """The kernel's EBUSY knows nothing of it: a pod's copy of the mount is another mount."""
    code = (
        "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); input(); sys.stdout.buffer.write(file.read())"
    )
    with mounted(lake, tmp_path / "m") as mount:
        pod = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", code, mount.file(0, 0)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert pod.stdout.readline() == b"\n"
        done = stepfs("unmount", mount.directory)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)
        assert "is busy" in done.stderr
        assert mount.steps()
        assert pod.communicate(b"\n", timeout=PATIENCE_S)[0] == payload(0, 0)
        assert stepfs("unmount", mount.directory).returncode == 0
        assert_nothing_is_left(mount)


def test_a_second_place_of_the_mount_is_named_at_once(lake, tmp_path):
    second = tmp_path / "it's another"
    second.mkdir()
    with mounted(lake, tmp_path / "m") as mount:
        ran(["mount", "--bind", str(mount.directory), str(second)], check=True)
        elsewhere = ran(["unshare", "--mount", "--propagation", "private", *STEPFS, "unmount", str(mount.directory)])
        assert elsewhere.returncode == 1
        assert f"`nsenter --mount --target {mount.pid} umount {mount.directory}`" in elsewhere.stderr
        done = stepfs("unmount", mount.directory)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        (offered,) = re.findall(r"`([^`]+)`", done.stderr)
        assert shlex.split(offered) == ["stepfs", "unmount", str(second)]
        assert stepfs("unmount", second).returncode == 0
        assert_nothing_is_left(mount)


def test_root_unmounts_a_users_mount(lake, tmp_path, request):
    """Which root may not read; the user is one without an account."""
    home, user = Path(tempfile.mkdtemp()), 54321  # below a directory that all users may enter
    request.addfinalizer(lambda: shutil.rmtree(home))
    directory = home / "m"
    directory.mkdir()
    for own in (home, directory):
        os.chown(own, user, user)
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # to reach this interpreter
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *rights, *STEPFS]
    env = {**os.environ, "STEPFS_LOG_DIR": str(home / "logs"), "HOME": str(home)}
    device = tmp_path / "fuse"  # of all users, as on most machines
    os.mknod(device, stat.S_IFCHR | 0o666, os.stat("/dev/fuse").st_rdev)
    device.chmod(0o666)
    ran(["mount", "--bind", str(device), "/dev/fuse"], check=True)  # in these tests' own namespace
    try:
        nameless = ran([*as_user, "mount", lake, str(directory)], env=env)
        assert (nameless.returncode, nameless.stderr.count("\n")) == (4, 1)
        assert "/etc/passwd" in nameless.stderr
        (home / "passwd").write_text(Path("/etc/passwd").read_text() + f"somebody:x:{user}:{user}::/:/bin/sh\n")
        ran(["mount", "--bind", str(home / "passwd"), "/etc/passwd"], check=True)
        done = ran([*as_user, "mount", lake, str(directory)], env=env)
        assert done.returncode == 0, done.stderr
        with pytest.raises(PermissionError):
            os.listdir(directory)
        hold = "import sys; file = open(sys.argv[1]); print(flush=True); input()"
        holder = subprocess.Popen(
            [*as_user[:-2], "-c", hold, directory / "step-000000000/rank-00000.bin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout.readline() == b"\n"
        assert stepfs("unmount", directory).returncode == 4
        holder.communicate(b"\n", timeout=PATIENCE_S)
        done = stepfs("unmount", directory)
        assert (done.returncode, done.stderr) == (0, "")
        assert mount_table.mount_at(directory) is None
    finally:
        clear(directory, None)
        ran(["umount", "/dev/fuse", "/etc/passwd"])


@pytest.mark.parametrize("name", [b"not \xff UTF-8 \xc3", b"x" * 255, "ü".encode() * 127])
def test_any_name_of_a_mount_point_will_do(lake, tmp_path, name):
    directory = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    with mounted(lake, directory, "--group", "run") as mount:
        assert mount.file(1, 0).read_bytes() == payload(1, 0)
        assert mount.config()["directory"] == str(directory)
        assert "stepfs_frontier_step" in (directory / ".stepfs/metrics").read_text()
        for command in ("status", "doctor", "ls"):
            done = stepfs(command, directory)
            assert (done.returncode, "Unicode" in done.stderr) == (0, False), done
        stepfs("unmount", directory).check_returncode()
        assert_nothing_is_left(mount)


def test_a_mount_that_is_busy_for_a_moment_is_unmounted(lake, tmp_path, monkeypatch):
    """`df`, `stepfs doctor` and others look at every mount of the machine."""
    met = []

    def end_the_look_when_met(look_up, **options):
        answer = answer_within(look_up, **options)
        if isinstance(answer, OSError):
            met.append(answer.errno)
            look.close()
        return answer

    monkeypatch.setattr("stepfs.mount.unmount.answer_within", end_the_look_when_met)
    with mounted(lake, tmp_path / "m") as mount:
        look = mount.file(0, 0).open("rb")
        unmount_and_wait(mount.directory)
        assert set(met) == {errno.EBUSY}  # also for as long as the daemon itself primes pages
        assert_nothing_is_left(mount)


def test_after_kill_9_a_new_mount_on_the_same_directory_works(lake, tmp_path):
    directory = tmp_path / "m"
    cached = ("--cache-dir", str(tmp_path / "c"), "--no-recover")
    with mounted(lake, directory, *cached) as first:
        first.kill(signal.SIGKILL)
        gone(first.pid)
        assert directory.is_dir()  # stat still succeeds: it proves nothing
        with pytest.raises(OSError) as refused:
            os.listdir(directory)
        assert refused.value.errno in {errno.ENOTCONN, errno.ECONNABORTED}  # the latter: asked while it died
        assert first.cache_dir.exists()
        with mounted(lake, directory, *cached) as second:
            assert second.file(2, 1).read_bytes() == payload(2, 1)
            assert second.cache_dir == first.cache_dir  # adopted
            at = [m for m in mount_table.mounts() if m.directory == str(directory)]
            assert len(at) == 1, "stacked on the dead one"
        assert_nothing_is_left(first)


def test_a_dead_mount_can_be_unmounted(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--no-recover") as mount:
        mount.kill(signal.SIGKILL)
        gone(mount.pid)
        asked = stepfs("status", mount.directory)
        assert (asked.returncode, asked.stdout, asked.stderr.count("\n")) == (1, "", 1)
        assert "the mount's daemon is gone; `stepfs mount` there again clears it, or `stepfs unmount " in asked.stderr
        assert stepfs("unmount", mount.directory).returncode == 0
        assert mount_table.mount_at(mount.directory) is None
        assert os.listdir(mount.directory) == []


def test_readers_of_a_killed_daemon_get_an_error_instead_of_hanging(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--wait", "600", "--no-recover") as mount:
        code = "import sys; open(sys.argv[1])"
        reader = subprocess.Popen([sys.executable, "-c", code, str(mount.file(9, 0))], stderr=subprocess.DEVNULL)
        until(lambda: mount.status()["waiting"] == 1, "nobody waits")
        mount.kill(signal.SIGKILL)
        assert reader.wait(timeout=PATIENCE_S) != 0


def test_a_mount_point_that_a_signal_has_left_is_closed_until_the_next_mount(lake, tmp_path):
    """A late open is refused, and does not look as if the step were not committed."""
    directory = tmp_path / "m"
    for back in ("mount", "unmount"):
        with mounted(lake, directory) as mount:
            directory_is = stat.S_IMODE(0o755)
            mount.kill(signal.SIGTERM)
            gone(mount.pid)
        assert stat.S_IMODE(directory.stat().st_mode) == 0
        assert "mode 0000, since a signal ended its mount" in machine.check_directory(directory).detail
        late = ["setpriv", "--reuid=54321", "--clear-groups", "cat", directory / "step-000000000/rank-00000.bin"]
        assert "Permission denied" in ran(late).stderr
        if back == "unmount":
            assert stepfs("unmount", directory).returncode == 0
            assert stepfs("unmount", directory).returncode == 3
            assert stat.S_IMODE(directory.stat().st_mode) == directory_is
        else:
            with mounted(lake, directory) as mount:
                assert stepfs("unmount", directory).returncode == 0
            assert stat.S_IMODE(directory.stat().st_mode) == directory_is


def test_foreground_serves_until_interrupted(lake, tmp_path):
    directory = tmp_path / "m"
    directory.mkdir()
    command = [
        sys.executable, "-c", "from stepfs.cli import main; main()", "mount", lake, str(directory), "--foreground",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while "serving" not in said:  # it says so when it is ready
            said = process.stderr.readline()
            assert said, "ended before it served"
        assert len(os.listdir(directory)) == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert "detached on SIGINT" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()
        clear(directory, None)
    assert os.listdir(directory) == []


def test_of_mounts_that_start_together_on_one_directory_one_lives(lake, tmp_path):
    """Every rank of a job script does it, or a unit and a person. The others leave its log alone, too."""
    directory, logs = tmp_path / "m", tmp_path / "logs"
    directory.mkdir()
    env = {**os.environ, "STEPFS_LOG_DIR": str(logs), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    together = [Forked("stepfs", "mount", lake, directory, env=env) for _ in range(3)]
    try:
        said = [process.communicate(timeout=60)[1] for process in together]
        assert sorted(process.wait() for process in together) == [0, 4, 4], said
        assert sum("is mounted here already" in text for text in said) == 2
        assert sum(mounted.directory == str(directory) for mounted in mount_table.mounts()) == 1
        (log,) = logs.iterdir()
        with log.open("ab") as file:
            file.truncate(LOG_BYTES_MAX + 1)
        assert forked.ran("stepfs", ["mount", lake, directory], env=env).returncode == 4
        assert log.stat().st_size > LOG_BYTES_MAX
        assert len(os.listdir(directory)) == 4
        stepfs("unmount", directory).check_returncode()
        assert mount_table.mount_at(directory) is None
    finally:
        clear(directory, None)


def test_bad_beginnings_say_one_line_and_their_exit_code(lake, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    nowhere = (tmp_path / "nowhere").as_uri()
    cases = [
        ((lake, tmp_path / "none"), 3, "does not exist"),
        ((nowhere, tmp_path / "empty"), 3, "is not a lake"),
        ((lake, tmp_path / "file"), 4, "is not a directory"),
        (("gopher://x/y", tmp_path / "empty"), 2, "gopher"),
        ((lake, tmp_path / "empty", "--world", "3"), 2, "2 slices"),
        ((lake, tmp_path / "empty", "--ranks", "0-7"), 2, "rank 7"),
        ((lake, tmp_path / "empty", "--steps", "5"), 2, "A:B"),
        ((lake, tmp_path / "empty", "--cache-size", "lots"), 2, "lots"),
        ((lake, tmp_path / "empty", "--memory", "1M"), 2, "at least 64M"),
        ((lake, tmp_path / "empty", "--cache-dir", tmp_path / "file"), 4, "--cache-dir"),
        ((lake, tmp_path / "empty", "--checkpoint-dir", tmp_path), 2, "--group"),
        ((lake, tmp_path / "empty", "--next-step", "N+1"), 2, "--next-step needs --checkpoint-dir"),
    ]
    for arguments, code, text in cases:
        done = stepfs("mount", *arguments)
        assert (done.returncode, done.stdout) == (code, ""), (arguments, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
        assert text in done.stderr
    assert mount_table.mount_at(tmp_path / "empty") is None
    assert os.listdir(tmp_path / "empty") == []


def kept_by(lake, group):
    async def read():
        store = open_store(lake)
        return (await list_groups(store, await open_lake(store)))[group].kept

    return trio.run(read)


def sockets_of(pid):
    sockets = (name for name in open_files(pid).values() if name.startswith("socket:"))
    return {name.removeprefix("socket:[").removesuffix("]") for name in sockets}


def listed_sockets():
    """Inodes of the sockets that this machine has, but for those in TIME_WAIT."""
    columns = {"tcp": 9, "tcp6": 9, "unix": 6}
    rows = {name: Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in columns}
    return {row.split()[columns[name]] for name in columns for row in rows[name]} - {"0"}


AT_NIGHT = {"SIGINT", "SIGHUP", "fusermount3", "umount -l", "umount -l, busy", "stepfs unmount"}


@pytest.mark.parametrize(
    "ending", [pytest.param(one, marks=pytest.mark.nightly) if one in AT_NIGHT else one for one in ENDINGS]
)
def test_nothing_is_left(lake, tmp_path, ending):
    checkpoints, base = tmp_path / "ckpt", tmp_path / "cache-of-this"
    checkpoints.mkdir()
    (port,) = servers.free_ports(1)
    options = ["--group", "run", "--checkpoint-dir", str(checkpoints), "--wait", "600"]
    options += ["--cache-dir", str(base), "--metrics-port", str(port)]
    options += ["--no-recover"] if ending == "kill -9, and the next mount" else []
    with mounted(lake, tmp_path / "m", *options) as mount:
        mount.options, mount.config_before = options, mount.config()  # type: ignore[attr-defined]
        assert mount.cache_dir.is_relative_to(base)
        assert mount.cache_dir.exists()
        for step in range(2):
            assert mount.file(step, 0).read_bytes() == payload(step, 0)
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
        until(lambda: nodes_of(lake), "the mount does not say that it is here")
        assert [node.pid for node in nodes_of(lake)] == [mount.pid]
        save(checkpoints, 2)  # and the trainer ends before anybody has looked
        sockets = listed_sockets() & sockets_of(mount.pid)
        assert sockets
        ENDINGS[ending](mount)
        if ending.startswith(("stepfs", "kill")):  # they wait
            assert not running(mount.pid)
            assert not mount.cache_dir.exists()
        assert_nothing_is_left(mount)
        assert not base.exists()
        assert processes_that_name(mount.directory) == []
        assert not sockets & listed_sockets()
        assert nodes_of(lake) == []
        assert kept_by(lake, "run") == ((2, 3) if "--checkpoint" in ending else (2,))


@pytest.mark.usefixtures("real_daemons")
def test_a_daemon_keeps_no_directory_busy_and_no_terminal(lake, tmp_path):
    with mounted(lake, tmp_path / "m", "--no-prime") as mount:
        process = Path(f"/proc/{mount.pid}")
        assert b"stepfs.mount.daemon" in (process / "cmdline").read_bytes()
        assert os.readlink(process / "cwd") == "/"
        assert os.getsid(mount.pid) == mount.pid
        assert {os.readlink(process / f"fd/{number}") for number in (1, 2)} == {str(mount.log)}
