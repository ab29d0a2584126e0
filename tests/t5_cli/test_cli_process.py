"""The commands as processes: what S3 servers refuse, Ctrl-C, pipes, and watching."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import servers
from finished import ran
from lakes import SLICES, commit, stepfs

STEPFS = Path(sysconfig.get_path("scripts")) / "stepfs"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran([STEPFS, *arguments], env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "reason"),
    [
        (["ls", "s3://no-such-bucket/x"], {}, 3, "the bucket of s3://no-such-bucket/x does not exist"),
        (["init", "s3://no-such-bucket/x", "--slices", "1"], {}, 3, "create it first"),
        (["ls", f"s3://{servers.BUCKET}/x"], {}, 3, "stepfs init"),
        (["ls", f"s3://{servers.BUCKET}/x"], {"AWS_SECRET_ACCESS_KEY": "wrong"}, 4, "AWS_SECRET_ACCESS_KEY"),
        (["ls", f"s3://{servers.BUCKET}/x", "--endpoint-url", "http://127.0.0.1:1"], {}, 6, "127.0.0.1:1"),
    ],
    ids=["bucket", "init", "prefix", "secret", "unreachable"],
)
def test_what_a_server_refuses_is_one_line_and_a_code(seaweed, arguments, environment, code, reason):
    ended = run(*arguments, **environment)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("stepfs: ")
    assert reason in ended.stderr
    assert servers.SECRET_KEY not in ended.stderr


def test_the_store_that_lies_is_refused_by_init_and_by_doctor(rclone):
    url = f"s3://{servers.BUCKET}/liar"
    environment = {**rclone.environment(), "AWS_ENDPOINT_URL_S3": rclone.endpoint_url}
    for command in (["init", url, "--slices", "1"], ["doctor", url]):
        ended = run(*command, **environment)
        assert ended.returncode == 4, ended
        assert "the condition is ignored" in ended.stdout + ended.stderr


def test_watching_shows_what_is_committed_until_interrupted(file_url):
    stepfs("init", file_url, "--slices", SLICES)
    with subprocess.Popen(
        [STEPFS, "status", file_url, "--watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["frontier"] == -1
            commit(file_url, range(2))
            frontier = -1
            while frontier != 1:
                frontier = json.loads(process.stdout.readline())["frontier"]
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=100)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "")


def test_output_may_be_cut_off(file_url):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(3))
    done = ran(["bash", "-c", f'"{STEPFS}" ls "{file_url}" | true; echo "${{PIPESTATUS[0]}}"'], check=True)
    assert done.stdout.strip() in {"0", "141"}
    assert done.stderr == ""


def test_it_runs_without_a_home_and_without_a_terminal():
    done = ran(
        [sys.executable, "-c", "from stepfs.cli import main; main()", "--version"],
        env={"PATH": os.environ["PATH"]},
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.startswith("stepfs ")
