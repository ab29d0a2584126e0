"""A Ray that cannot be used is said in one line with the right exit code; one of our own leaves nothing, however it ends."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepfs.errors import StepfsError, UsageError
from stepfs_producer.engine.reach import _REAPER, of_our_own, quiet, refusal_of, refuse_unreachable

# As Ray 2.60 raises them.
VERSION = RuntimeError(
    "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    "This process on node 10.0.0.5 was started with:\n    Ray: 2.55.0\n    Python: 3.11.7\n"
)
NO_TOKEN = RuntimeError(
    "Token authentication is enabled but no authentication token was found. Ensure that the token …"
)
WRONG_TOKEN = ConnectionError("Failed to connect to Ray cluster at 10.0.0.4:6379")
WRONG_TOKEN.__cause__ = RuntimeError(
    "Failed to connect to GCS. Last connection error: Traceback (most recent call last):\n"
    "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing or incorrect."
)
NO_NODE = ConnectionError("Failed to connect to Ray cluster at 10.0.0.4:6379")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (VERSION, 4, "Ray: 2.60.0 Python: 3.11.7 This process on node 10.0.0.5"),
        (NO_TOKEN, 4, "RAY_AUTH_TOKEN"),
        (WRONG_TOKEN, 4, "RAY_AUTH_TOKEN"),
        (NO_NODE, 6, "ray start --address=10.0.0.4:6379"),
    ],
)
def test_a_cluster_that_does_not_take_us_is_told_in_one_line(error: Exception, code: int, words: str) -> None:
    refused = refusal_of(error, "10.0.0.4:6379")
    assert (refused.exit_code, "\n" in str(refused)) == (code, False)
    assert words in str(refused)
    assert "10.0.0.4:6379" in str(refused)


def test_errors_of_ours_stay_as_they_are() -> None:
    error = UsageError("too large")
    assert refusal_of(error, None) is error


def test_a_ray_that_does_not_start_here_is_told_in_one_line() -> None:
    refused = refusal_of(RuntimeError("no space left\nTraceback …"), None)
    assert (refused.exit_code, str(refused)) == (4, "Ray could not be started on this machine: no space left")


@pytest.mark.parametrize("address", ["ray://10.0.0.4:10001", "10.0.0.4", ":6379", "10.0.0.4:"])
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="write auto, or HOST:PORT"):
        await refuse_unreachable(address)


async def test_where_nobody_listens_is_told_at_once() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(StepfsError, match="cannot be reached") as caught:
            await refuse_unreachable(f"127.0.0.1:{bound.getsockname()[1]}")
    assert caught.value.exit_code == 6


def test_ray_says_nothing_beside_us(capfd) -> None:
    with quiet():
        os.write(2, b"[2026-11-24] W rpc_client.h:153: Failed to connect")
    os.write(2, b"and we do")
    assert capfd.readouterr().err == "and we do"


COMMAND = """
import subprocess, sys, time
from stepfs_producer.engine.reach import of_our_own
with of_our_own() as directory:
    agent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(directory, agent.pid, flush=True)
    time.sleep(600)
"""


def test_nothing_of_our_ray_outlives_a_command_that_was_killed() -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, "RAY_AUTH_TOKEN": "f" * 32}
    )
    with subprocess.Popen([sys.executable, "-c", COMMAND], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        directory, agent = command.stdout.readline().split()
        assert Path(directory).is_dir()
        token = dict(line.split("=", 1) for line in Path(f"/proc/{agent}/environ").read_text().split("\0") if line)
        command.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    while Path(directory).exists() or Path(f"/proc/{agent}/exe").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)  # of a Ray that was starting a worker at that moment, one comes up late
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=token) as late:
        assert late.wait(60) == -signal.SIGKILL
    assert other.poll() is None, "of another Ray"
    other.kill()
    other.wait()


def test_a_directory_that_cannot_be_removed_is_given_up(monkeypatch, tmp_path) -> None:
    """The reaper went on for ever, twenty times a second, and who read the command's stderr to its end waited as long."""
    looks = 0

    def look(path: str) -> list[str]:
        nonlocal looks
        looks += 1
        assert (path, looks <= 1200) == ("/proc", True)
        return []

    monkeypatch.setenv("RAY_AUTH_TOKEN", "f" * 32)
    monkeypatch.setattr("os.listdir", look)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    monkeypatch.setattr("sys.argv", ["-c", str(tmp_path)])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("time.sleep", lambda _: None)
    exec(_REAPER, {})
    assert looks == 1200


def test_an_orderly_end_leaves_neither_directory_nor_token(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with of_our_own() as directory:
        os.environ["RAY_AUTH_MODE"] = "token"  # as Ray does
        assert os.environ["RAY_AUTH_TOKEN"] != "the user's"
        Path(directory, "session").mkdir()
    assert not Path(directory).exists()
    assert (os.environ["RAY_AUTH_TOKEN"], os.environ.get("RAY_AUTH_MODE")) == ("the user's", None)
