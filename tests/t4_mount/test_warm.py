"""A command that is forked from a loaded interpreter does what one of its own interpreter does."""

from __future__ import annotations

import os
import subprocess

import pytest
import warm
from realmount import STEPFS, make_lake, produce

COMMANDS = [
    ["ls", "lake.of.nobody"],  # names a file: URL, made of the directory it runs in
    ["ls", "--nonsense"],
    ["mount", "file:///nowhere", "/nowhere/at/all"],
    ["--version"],
    ["status", "LAKE", "--json"],
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_it_prints_and_ends_as_a_fresh_one_does(file_url, tmp_path, monkeypatch, arguments):
    make_lake(file_url)
    produce(file_url, 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPFS_NOBODY_KNOWS", "1")  # said on stderr: the environment is the one of now
    command = [file_url if word == "LAKE" else word for word in arguments]
    fresh = subprocess.run([*STEPFS, *command], capture_output=True, text=True, timeout=100, check=False)
    forked = warm.run(command, env=dict(os.environ), timeout_s=100)
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert fresh.stdout + fresh.stderr


def test_one_that_takes_too_long_is_killed(file_url):
    make_lake(file_url)
    with pytest.raises(subprocess.TimeoutExpired) as late:
        warm.run(["status", file_url, "--watch", "--json"], env=dict(os.environ), timeout_s=2.0)
    assert late.value.cmd[0] == "status"
