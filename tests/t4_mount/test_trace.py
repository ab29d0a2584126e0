"""`stepfs trace` of a real mount: its file, and how it ends when somebody interrupts it or the daemon dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from realmount import PATIENCE_S, STEPFS, mounted, needs_resend, stepfs, until
from succession import kill

from stepfs.view.inodes import Fixed


class Tracing:
    """`stepfs trace` in a process of its own."""

    def __init__(self, mount, out, *options):
        arguments = [*STEPFS, "trace", str(mount.directory), "--out", str(out), *options]
        self.out = out
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: traced(mount), "nobody traces")

    def end(self, number=None):
        if number is not None:
            self.process.send_signal(number)
        said, told = self.process.communicate(timeout=PATIENCE_S)
        return said, told

    def events(self):
        document = json.loads(self.out.read_text())
        return [event for event in document["traceEvents"] if event.get("cat") == "stepfs"]


def traced(mount):
    """The second look has begun, so the first one has its answer."""
    return (mount.directory / ".stepfs/accesslog").read_text().count(f" open({Fixed.TRACE:d}") > 1


def names(events):
    return {event["name"] for event in events}


def test_ctrl_c_ends_a_trace_with_a_whole_file(lake, tmp_path):
    out = tmp_path / "trace.json"
    with mounted(lake, tmp_path / "m", "--no-prime") as mount:
        tracing = Tracing(mount, out, "--seconds", "600")
        for step in range(3):
            mount.file(step, 1).read_bytes()
        until(lambda: "GET step 2" in (mount.directory / ".stepfs/trace").read_text(), "no event")
        said, told = tracing.end(signal.SIGINT)
        assert (tracing.process.returncode, told) == (0, "")
        assert "(interrupted)" in said
        assert {f"open step {step}" for step in range(3)} <= names(tracing.events())


@needs_resend
def test_a_daemon_that_dies_leaves_what_there_was_and_the_next_one_goes_on(lake, tmp_path):
    out = tmp_path / "trace.json"
    with mounted(lake, tmp_path / "m", "--no-prime", "--spare") as mount:
        tracing = Tracing(mount, out, "--seconds", "600")
        mount.file(0, 0).read_bytes()
        before = mount.pid
        kill(mount)
        until(lambda: "look" in (mount.directory / ".stepfs/trace").read_text(), "the next one is not traced")
        mount.file(2, 0).read_bytes()
        until(lambda: "open step 2" in (mount.directory / ".stepfs/trace").read_text(), "no event")
        _, told = tracing.end(signal.SIGINT)
        assert f"pid {mount.pid} serves in place of {before}, whose last events may be missing" in told
        assert {"another daemon serves", "open step 2"} <= names(tracing.events())


def test_a_mount_that_ends_ends_the_trace_with_what_there_was(lake, tmp_path):
    out = tmp_path / "trace.json"
    with mounted(lake, tmp_path / "m", "--no-recover") as mount:
        tracing = Tracing(mount, out, "--seconds", "600")
        mount.kill(signal.SIGKILL)
        said, told = tracing.end()
        assert tracing.process.returncode == 1
        assert "the daemon does not answer any more" in told
        assert "events" in said
        json.loads(out.read_text())
        dead = stepfs("trace", mount.directory, "--out", out)
        assert dead.returncode in {1, 6}
        assert "daemon is gone" in dead.stderr


def test_what_is_no_mount_a_profile_that_is_none_and_a_full_disk(lake, tmp_path):
    out = tmp_path / "trace.json"
    (tmp_path / "plain").mkdir()
    assert stepfs("trace", tmp_path / "plain", "--out", out).returncode == 3
    assert stepfs("trace", tmp_path / "nothing", "--out", out).returncode == 3
    with mounted(lake, tmp_path / "m") as mount:
        assert stepfs("trace", mount.directory, "--out", tmp_path / "no/t.json").returncode == 3
        assert stepfs("trace", mount.directory, "--out", out, "--merge", mount.log).returncode == 2
        if Path("/dev/full").exists() and os.geteuid() == 0:
            small = tmp_path / "small"
            small.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=3", "none", small], check=True)
            try:
                (small / "filler").write_bytes(bytes(4096))
                ended = stepfs("trace", mount.directory, "--out", small / "t.json", "--seconds", "0.1")
                assert ended.returncode == 1
                assert "No space left on device; nothing is under that name" in ended.stderr
                assert os.listdir(small) == ["filler"]
            finally:
                subprocess.run(["umount", small], check=True)
        assert not out.exists()
        missing = stepfs("trace", mount.directory, "--out", out, "--merge", tmp_path / "none.json", "--seconds", "0.1")
        assert missing.returncode == 3
        assert "none.json does not exist" in missing.stderr
        assert json.loads(out.read_text())["schemaVersion"] == 1, "what was traced is not lost"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone becomes another user")
def test_another_users_mount(lake, tmp_path):
    """With --allow-other others read, and may not trace."""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:-2]:  # below /tmp
        parent.chmod(parent.stat().st_mode | 0o011)
    with mounted(lake, tmp_path / "m", "--allow-other") as mount:
        read = "import sys; print(len(open(sys.argv[1]).read()))"
        for name, code in (("status.json", 0), ("trace", 1)):
            done = subprocess.run(
                [shutil.which("python3", path="/usr/bin:/bin") or sys.executable, "-c", read, mount.directory / ".stepfs" / name],
                check=False, user=65534, group=65534, capture_output=True, text=True,
            )  # fmt: skip
            assert done.returncode == code, done.stderr
            assert ("Permission denied" in done.stderr) is bool(code)
