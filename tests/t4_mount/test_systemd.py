"""The unit of scripts/deploy under a real systemd: whatever ends its daemon, readers notice nothing until the unit stops."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from endings import processes_that_name
from finished import ran
from realmount import PATIENCE_S, Mount, clear, gone, needs_resend, until
from steady import STEPS, daemons_of, steady_readers

from stepfs.mount.host.mount_table import mount_at

UNIT = Path(__file__).parents[2] / "scripts/deploy/stepfs@.service"
CGROUPS = Path("/sys/fs/cgroup/systemd" if Path("/sys/fs/cgroup/systemd").exists() else "/sys/fs/cgroup")
pytestmark = [
    needs_resend,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes a mount namespace and a cgroup"),
    pytest.mark.usefixtures("real_daemons"),
]


@pytest.fixture
def systemctl(monkeypatch):
    """A manager of our own, which knows this machine as one that systemd has booted."""
    if shutil.which("systemctl") is None or not os.access(CGROUPS, os.W_OK):
        pytest.skip("no systemd, or no cgroup for it")
    runtime = Path(tempfile.mkdtemp())  # short: of sockets
    group = CGROUPS / f"stepfs-tests-{os.getpid()}"
    ran(["mount", "-t", "tmpfs", "tmpfs", "/run/systemd"], check=True)
    Path("/run/systemd/system").mkdir()
    group.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("HOME", str(runtime))

    enter = 'echo $$ > "$0/cgroup.procs" && exec /lib/systemd/systemd --user --unit=basic.target'
    manager = subprocess.Popen(["sh", "-c", enter, group])

    def systemctl(*words, check=True):
        return ran(["systemctl", "--user", *words], timeout=PATIENCE_S, check=check).stdout.strip()

    try:
        until((runtime / "systemd/private").exists, "systemd --user does not run")
        yield runtime, systemctl
    finally:
        systemctl("exit", check=False)
        with suppress(subprocess.TimeoutExpired):
            manager.wait(PATIENCE_S)
        manager.kill()
        manager.wait()
        assert not group.exists()  # it has removed it
        ran(["umount", "/run/systemd"], check=True)
        shutil.rmtree(runtime)


@pytest.fixture
def unit(systemctl, steady, tmp_path, monkeypatch):
    """The unit as it is deployed, with this interpreter's stepfs."""
    runtime, control = systemctl
    (tmp_path / "m").mkdir()
    stepfs = shutil.which("stepfs", path=Path(sys.executable).parent)
    settings = {"LAKE": steady, "DIR": tmp_path / "m", "LOG_DIR": tmp_path / "logs", "RANKS": "0-1"}
    (tmp_path / "run.conf").write_text("".join(f"STEPFS_{name}={value}\n" for name, value in settings.items()))
    text = UNIT.read_text().replace("/usr/local/bin/stepfs", str(stepfs)).replace("/etc/stepfs/%i", f"{tmp_path}/%i")
    units = runtime / "systemd/user"
    units.mkdir(parents=True, exist_ok=True)
    (units / "stepfs@.service").write_text(text.replace("TimeoutStopSec=60", "TimeoutStopSec=2"))
    (units / "stepfs@.service.d").mkdir()
    (units / "stepfs@.service.d/log.conf").write_text(f"[Service]\nStandardError=append:{tmp_path}/log\n")
    control("daemon-reload")
    control("start", "stepfs@run")
    mount = Mount(tmp_path / "m", tmp_path / "logs", 0, Path("/nonexistent"))
    mount.pid = mount.config()["pid"]
    try:
        yield mount, control
    finally:
        control("stop", "stepfs@run", check=False)
        clear(mount.directory, None)


@pytest.mark.nightly
def test_readers_notice_neither_a_death_nor_a_reload_until_the_unit_stops(unit, steady):
    mount, control = unit

    def main():
        return int(control("show", "--value", "--property=MainPID", "stepfs@run"))

    def follower():
        before, mount.pid = mount.pid, mount.config()["pid"]
        assert mount.config()["follows"] == before
        assert main() == mount.config()["keeper"]
        until(lambda: daemons_of(mount) == [mount.pid], "others serve, too")
        until(lambda: control("is-active", "stepfs@run", check=False) == "active", "inactive", every_s=0.2)

    with steady_readers(steady, mount):
        mount.kill(signal.SIGKILL)
        follower()
        control("reload", "stepfs@run")
        follower()
        mount.kill(signal.SIGABRT)
        follower()
    status = mount.status()
    assert (status["recoveries"], status["handovers"], status["next_step"]) == (2, 1, STEPS + 1)
    control("stop", "stepfs@run")
    gone(mount.pid)
    assert mount_at(mount.directory) is None
    assert processes_that_name(mount.directory) == []  # no keeper either
