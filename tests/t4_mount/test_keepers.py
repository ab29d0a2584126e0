"""The root process of a mount: whatever ends a daemon, it is followed; a supervisor sees one process; who asks is answered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from finished import ran
from realmount import (
    PATIENCE_S,
    STEPFS,
    change_constants,
    clear,
    gone,
    lake_with,
    mounted,
    needs_resend,
    payload,
    running,
    stepfs,
    until,
)
from steady import SIZE, daemons_of, steady_readers
from succession import keeper_follows, kill, replace, replaced, tampered

from stepfs.mount.host.mount_table import mount_at

pytestmark = pytest.mark.usefixtures("real_daemons")

FAULTS = {  # K1, K12
    "RuntimeError": "raise RuntimeError('cannot start new thread')",
    "OSError": "raise OSError(24, 'Too many open files')",
    "StepfsError": "from stepfs.errors import CorruptError\n        raise CorruptError('rotten')",
}


@needs_resend
@pytest.mark.parametrize(
    "fault", [*(pytest.param(one, marks=pytest.mark.nightly) for one in ("RuntimeError", "OSError")), "StepfsError"]
)
def test_an_exception_in_a_daemon_is_a_death_and_not_the_wish_that_the_mount_ends(steady, tmp_path, monkeypatch, fault):
    code = f"""
import sys
if "stepfs.mount.daemon" in sys.orig_argv and once():
    import trio
    from stepfs.mount.daemon.session import _Session
    keep = _Session._keep_state
    async def fails(self, mount):
        while not os.path.exists({str(tmp_path / "now")!r}):
            await trio.sleep(0.01)
        {FAULTS[fault]}
    _Session._keep_state = fails
"""
    with (
        tampered(monkeypatch, tmp_path, code),
        mounted(steady, tmp_path / "m", "--ranks", "0-1", allowed=[""]) as mount,
        steady_readers(steady, mount),
    ):
        (tmp_path / "now").touch()
        gone(mount.pid)
        assert mount.config()["follows"] == mount.pid
        mount.pid = mount.config()["pid"]
        assert mount.status()["recoveries"] == 1


def test_a_replacement_changes_what_is_named_and_keeps_the_rest(steady, tmp_path):
    saved, first, second = tmp_path / "saved", tmp_path / "c1", tmp_path / "c2"
    saved.mkdir()
    options = ("--wait", "9", "--group", "run", "--checkpoint-dir", str(saved), "--cache-dir", str(first), "--no-prime")
    with mounted(steady, tmp_path / "m", *options) as mount:
        before = mount.config()["options"]
        done = replaced(mount)
        assert (done.returncode, done.stderr) == (0, "")
        assert mount.config()["options"] == before
        done = replaced(mount, "--cache-dir", str(second), "--prime")
        assert done.returncode == 0
        assert f"--cache-dir {second} (was --cache-dir {first})" in done.stderr
        assert "--prime (was --no-prime)" in done.stderr
        assert mount.config()["options"] == before | {"cache-dir": str(second), "prime": True}
        until(lambda: not first.exists(), "the cache of the one before is left")  # K4
        done = replaced(mount, "--no-group", "--wait", "0")
        assert done.returncode == 0
        after = mount.config()["options"]
        assert (after["group"], after["checkpoint-dir"], after["wait"]) == (None, None, None)
        mount.pid = mount.config()["pid"]
        assert replaced(mount, "--checkpoint-dir", str(saved)).returncode == 2  # there is no group
        assert replaced(mount, "--no-group", "--group", "x").returncode == 2
        assert mount.config()["pid"] == mount.pid
    assert not second.exists()


SLOW_START = """
import sys
if "stepfs.mount.daemon" in sys.orig_argv and not once():
    import time
    from stepfs.mount.fuse.link import Link
    introduce = Link.introduce
    async def late(self):
        open({here!r}, "w").close()
        import trio
        await trio.sleep(600)
    Link.introduce = late
"""


@pytest.mark.parametrize(
    "how", [*(pytest.param(one, marks=pytest.mark.nightly) for one in ("SIGTERM", "umount")), "death"]
)
def test_the_mount_ends_at_once_though_another_daemon_is_about_to_come(steady, tmp_path, monkeypatch, how):
    """It has no device before it serves (K15)."""
    code = SLOW_START.format(here=str(tmp_path / "late"))
    allowed = ["so that readers fail"]
    with (
        tampered(monkeypatch, tmp_path, code),
        mounted(steady, tmp_path / "m", "--no-recover", allowed=allowed) as mount,
    ):
        results = []
        taking = threading.Thread(target=lambda: results.append(replaced(mount)))
        taking.start()
        until((tmp_path / "late").exists, "it does not start")
        with mount.file(3, 0).open("rb") if how != "umount" else open(os.devnull, "rb"):
            if how == "SIGTERM":
                os.kill(mount.keeper, signal.SIGTERM)
            elif how == "umount":
                ran(["umount", str(mount.directory)], check=True)
            else:
                mount.kill(signal.SIGKILL)
            gone(mount.keeper)
        taking.join()
        assert results[0].returncode in {1, 4}
        assert not daemons_of(mount)


@needs_resend
@pytest.mark.parametrize(
    "where", ["renamed", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("covered", "bound elsewhere"))]
)
def test_a_mount_is_found_by_its_device_wherever_it_is(steady, tmp_path, monkeypatch, where):
    """K16"""
    (tmp_path / "up").mkdir()
    (tmp_path / "other").mkdir()
    with mounted(steady, tmp_path / "up/m") as mount:
        held, there = mount.file(2, 0).open("rb", buffering=0), mount.directory
        if where == "renamed":
            (tmp_path / "up").rename(tmp_path / "moved")
            there = tmp_path / "moved/m"
        elif where == "covered":
            ran(["mount", "-t", "tmpfs", "tmpfs", str(mount.directory)], check=True)
        else:
            ran(["mount", "--bind", str(mount.directory), str(tmp_path / "other")], check=True)
            ran(["umount", "-l", str(mount.directory)], check=True)
            there = tmp_path / "other"
        os.kill(mount.pid, signal.SIGKILL)
        with held:
            assert held.read(1 << 20) == payload(2, 0, SIZE)
        if where == "covered":
            ran(["umount", str(mount.directory)], check=True)
        config = json.loads((there / ".stepfs/config.json").read_text())
        assert config["follows"] == mount.pid
        assert (there / "step-000000001/rank-00001.bin").read_bytes() == payload(1, 1, SIZE)
        os.kill(config["keeper"], signal.SIGTERM)
        gone(config["keeper"])
        assert mount_at(there) is None
        if where == "renamed":
            shutil.rmtree(tmp_path / "up", ignore_errors=True)  # made anew by the log, or not
            (tmp_path / "moved").rename(tmp_path / "up")


@contextmanager
def foreground(lake, directory, log, *options):
    """As a supervisor starts it."""
    directory.mkdir(exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*STEPFS, "mount", lake, str(directory), "--foreground", *options], stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def config_of(directory):
    return json.loads((directory / ".stepfs/config.json").read_text())


def is_kept_by(directory, process):
    return mount_at(directory) is not None and config_of(directory)["keeper"] == process.pid


@needs_resend
def test_a_supervisors_restart_goes_on_with_the_mount_of_its_keeper_that_was_killed(steady, tmp_path, request):
    """supervisord, runit, s6: they see one process, and end the mount by it (K17)."""
    directory, log = tmp_path / "m", tmp_path / "log"
    request.addfinalizer(lambda: clear(directory, None))
    with foreground(steady, directory, log) as first:
        until(lambda: is_kept_by(directory, first), "not mounted")
        daemon = config_of(directory)["pid"]
        os.kill(daemon, signal.SIGKILL)
        assert config_of(directory)["follows"] == daemon
        assert first.poll() is None
        daemon = config_of(directory)["pid"]
        done = ran([*STEPFS, "mount", steady, str(directory), "--foreground"], timeout=PATIENCE_S)
        assert done.returncode == 4  # its keeper lives
        done = ran([*STEPFS, "mount", steady, str(directory), "--foreground", "--replace"], timeout=PATIENCE_S)
        assert done.returncode == 4
    until(lambda: config_of(directory)["keeper"] != first.pid, "no other keeper")
    with (directory / "step-000000001/rank-00000.bin").open("rb") as held, foreground(steady, directory, log) as second:
        until(lambda: is_kept_by(directory, second), "it does not take it")
        assert config_of(directory)["pid"] == daemon
        assert held.read() == payload(1, 0, SIZE)
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE_S) == 0
        assert mount_at(directory) is None
        assert not running(daemon)


@pytest.mark.nightly
def test_a_mount_in_the_background_is_taken_into_the_foreground_with_other_options(steady, tmp_path):
    words = ("--replace", "--memory", "128M")
    with (
        mounted(steady, tmp_path / "m", "--wait", "9") as mount,
        foreground(steady, mount.directory, tmp_path / "log", *words) as process,
    ):
        with steady_readers(steady, mount):
            until(lambda: is_kept_by(mount.directory, process), "it does not take it")
            gone(mount.keeper)
            until(lambda: mount.config()["memory_bytes"] == 128 << 20, "not replaced")
            assert mount.config()["options"]["wait"] == "9s"
            mount.pid = mount.config()["pid"]
            replace(mount)
            assert is_kept_by(mount.directory, process)  # as before
        mount.keeper = process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.nightly
def test_in_a_pid_namespace_it_is_the_first_process_and_others_are_told_where_to_ask(
    steady, tmp_path, monkeypatch, request
):
    """K14"""
    directory = tmp_path / "m"
    directory.mkdir()
    request.addfinalizer(lambda: clear(directory, None))
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    words = ["unshare", "--pid", "--fork", *STEPFS, "mount", steady, str(directory), "--foreground"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        until(lambda: mount_at(directory) is not None, "not mounted")
        config = config_of(directory)
        assert config["keeper"] == 1
        done = stepfs("mount", steady, directory, "--replace")
        assert done.returncode == 4
        assert "ask from the pid namespace of this mount's keeper" in done.stderr
        assert config_of(directory)["pid"] == config["pid"]
        stepfs("unmount", directory).check_returncode()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
@needs_resend
def test_while_no_daemon_can_start_each_command_says_so_and_unmount_works(steady, tmp_path, monkeypatch):
    change_constants(monkeypatch, {"stepfs.mount.launch:PATIENCE_S": 600.0})
    code = "import sys\nif 'stepfs.mount.daemon' in sys.orig_argv and not once(): sys.exit('half installed')"
    cache = tmp_path / "c"
    options = ("--cache-dir", str(cache))
    with (
        tampered(monkeypatch, tmp_path, code),
        mounted(steady, tmp_path / "m", *options, allowed=[""]) as mount,
    ):
        assert cache.exists()
        mount.kill(signal.SIGKILL)
        reader = subprocess.Popen(["cat", mount.file(2, 0)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for words, exit_code in {("status",): 6, ("doctor",): 6}.items():
            done = stepfs(*words, mount.directory)
            assert done.returncode == exit_code, done.stderr
            assert f"no daemon serves; its keeper (pid {mount.keeper}) has tried" in done.stdout + done.stderr
        done = stepfs("mount", steady, mount.directory)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)
        assert "has tried" in done.stderr
        stepfs("unmount", mount.directory).check_returncode()
        gone(mount.keeper)
        assert reader.wait(PATIENCE_S) != 0
        reader.communicate()
        assert mount_at(mount.directory) is None
        assert not cache.exists()


@pytest.mark.nightly
@needs_resend
def test_where_no_daemon_can_start_another_command_serves(steady, tmp_path, monkeypatch):
    change_constants(monkeypatch, {"stepfs.mount.launch:PATIENCE_S": 600.0})
    code = "import sys\nif 'stepfs.mount.daemon' in sys.orig_argv and not once(): sys.exit('half installed')"
    with tampered(monkeypatch, tmp_path, code), mounted(steady, tmp_path / "m") as mount:
        with mount.file(1, 0).open("rb", buffering=0) as held:
            mount.kill(signal.SIGKILL)
            gone(mount.pid)
            (tmp_path / "tamper/sitecustomize.py").write_text("")
            assert replaced(mount).returncode == 0
            assert held.read(1 << 20) == payload(1, 0, SIZE)
        mount.pid = mount.config()["pid"]


@pytest.mark.nightly
@needs_resend
def test_with_a_spare_a_death_costs_no_start_of_an_interpreter(steady, tmp_path):
    with mounted(steady, tmp_path / "m", "--spare") as mount, steady_readers(steady, mount):
        for _ in range(2):
            until(lambda: len(daemons_of(mount)) == 2, "no spare one")
            spare = max({*daemons_of(mount)} - {mount.pid})
            kill(mount)
            assert mount.pid == spare
        until(lambda: len(daemons_of(mount)) == 2, "no spare one")
    until(lambda: not daemons_of(mount), "the spare one is left")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_sixty_four_mounts_of_one_node_are_replaced_at_once(file_url, tmp_path, monkeypatch):
    lake_with(file_url, 2)
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    places = [tmp_path / f"m{number}" for number in range(64)]
    try:
        for place in places:
            place.mkdir()
            stepfs("mount", file_url, place, "--memory", "64M", timeout_s=600).check_returncode()
        held = [(place / "step-000000001/rank-00001.bin").open("rb", buffering=0) for place in places]
        keepers = [config_of(place)["keeper"] for place in places]
        words = [[*STEPFS, "mount", file_url, str(place), "--replace"] for place in places]
        together = [subprocess.Popen(one, stderr=subprocess.PIPE) for one in words]
        said = [process.communicate(timeout=600)[1] for process in together]
        assert {process.returncode for process in together} == {0}, said
        for place, file, keeper in zip(places, held, keepers, strict=True):
            assert file.read(1 << 20) == payload(1, 1)
            file.close()
            status = json.loads((place / ".stepfs/status.json").read_text())
            assert (status["handovers"], status["keeper"]) == (1, keeper)
    finally:
        for place in places:
            stepfs("unmount", place, timeout_s=600)
            clear(place, None)


@pytest.mark.nightly
def test_the_socket_is_found_whatever_the_variables_of_the_moment(steady, tmp_path, monkeypatch):
    """K18"""
    with mounted(steady, tmp_path / "m") as mount:
        place = Path(mount.config()["keeper_place"])
        (name,) = [
            path.name
            for path in place.iterdir()
            if path.name.endswith(f"-{mount.config()['device'].replace(':', '-')}.sock")
        ]
        own = (place / name).stat().st_ino
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        assert name.startswith(boot.replace("-", "")[:12])
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
        replace(mount)
    with suppress(FileNotFoundError):  # by now another mount may have the number
        assert (place / name).stat().st_ino != own


@pytest.mark.nightly
@needs_resend
def test_a_log_that_cannot_be_opened_ends_no_daemon(steady, tmp_path, monkeypatch):
    """A file system that went read-only, or a variable of the moment in which somebody replaces."""
    with mounted(steady, tmp_path / "m", allowed=["cannot write the log"]) as mount, steady_readers(steady, mount):
        mount.log.rename(mount.log.with_suffix(".moved"))
        mount.log.mkdir()
        try:
            mount.kill(signal.SIGKILL)
            assert mount.config()["follows"] == mount.pid
            mount.pid = mount.config()["pid"]
        finally:
            mount.log.rmdir()
            mount.log.with_suffix(".moved").rename(mount.log)
        monkeypatch.setenv("STEPFS_LOG_DIR", "/proc/nowhere")
        done = stepfs("mount", steady, mount.directory, "--replace")  # the log is the keeper's
        assert (done.returncode, done.stderr) == (0, "")
        before, mount.pid = mount.pid, mount.config()["pid"]
        assert mount.config()["follows"] == before
    assert "gave it away" in mount.log.read_text()


@needs_resend
def test_an_unmount_right_after_a_death_leaves_a_busy_mount(steady, tmp_path):
    with mounted(steady, tmp_path / "m") as mount, mount.file(3, 0).open("rb", buffering=0) as held:
        mount.kill(signal.SIGKILL)
        done = stepfs("unmount", mount.directory)
        assert done.returncode == 4, done.stderr
        assert held.read(1 << 20) == payload(3, 0, SIZE)
        mount.pid = mount.config()["pid"]


@pytest.mark.nightly
def test_a_mount_of_another_lake_in_the_foreground_takes_nothing(steady, tmp_path):
    other = (tmp_path / "other").as_uri()
    lake_with(other, 2)
    with mounted(steady, tmp_path / "m", allowed=["another one is started"]) as mount:
        keeper_follows(mount)
        done = ran([*STEPFS, "mount", other, str(mount.directory), "--foreground"], timeout=PATIENCE_S)
        assert done.returncode == 4
        assert "is mounted here already" in done.stderr
        assert mount.config()["keeper"] == mount.keeper


@pytest.mark.nightly
def test_what_was_logged_in_the_foreground_stays_there(steady, tmp_path, monkeypatch, request):
    directory, log = tmp_path / "m", tmp_path / "log"
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    request.addfinalizer(lambda: clear(directory, None))
    with foreground(steady, directory, log) as process:
        until(lambda: is_kept_by(directory, process), "not mounted")
        stepfs("mount", steady, directory, "--replace").check_returncode()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    assert "detached on SIGINT" in log.read_text()
    assert not (tmp_path / "logs").exists() or not any((tmp_path / "logs").iterdir())


@pytest.mark.nightly
def test_a_keeper_that_is_stopped_is_named(steady, tmp_path):
    with mounted(steady, tmp_path / "m") as mount:
        os.kill(mount.keeper, signal.SIGSTOP)
        try:
            done = replaced(mount)
        finally:
            os.kill(mount.keeper, signal.SIGCONT)
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)
        assert "its keeper does not answer" in done.stderr
        replace(mount)
