"""What is forked from a loaded interpreter, a command or a daemon, does what one of its own interpreter does."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import warm
from realmount import STEPFS, make_lake, mounted, payload, produce, until

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


def facts_of(pid):
    """What the kernel says of a process: where it runs, what it holds open, what it does with signals."""
    process = Path(f"/proc/{pid}")

    def held():
        links = sorted(process.glob("fd/*"), key=lambda link: int(link.name))
        try:
            return [re.sub(r"\d+", "N", os.readlink(link)) for link in links]
        except FileNotFoundError:  # one was closed meanwhile
            return []

    looks: list[list[str]] = [[]]

    def at_rest():
        looks.append(held())
        return looks[-1] != [] and looks[-1] == looks[-2]

    until(at_rest, 20, "it opens and closes files again and again")
    open_files = looks[-1]
    signals = re.findall(r"(?:Sig(?:Blk|Ign|Cgt)|Umask|Cap\w+):.*", (process / "status").read_text())
    return {
        "cwd": os.readlink(process / "cwd"),
        "leads its session": os.getsid(pid) == pid,
        "standard": open_files[:3],
        "open": sorted(open_files),
        "signals": signals,
    }


def test_a_forked_daemon_is_what_a_fresh_one_is(file_url, tmp_path, monkeypatch):
    make_lake(file_url)
    produce(file_url, 2)
    monkeypatch.setenv("STEPFS_LOG_FORMAT", "json")  # the environment is the one of now
    found, at_rest = [], ["--no-prime", "--prefetch", "0", "--poll", "30s"]
    for fresh in (True, False):
        with mounted(file_url, tmp_path / "m", *at_rest, fresh_daemon=fresh) as mount:
            assert (b"stepfs.mount.daemon" in Path(f"/proc/{mount.pid}/cmdline").read_bytes()) is fresh
            assert mount.file(1, 1).read_bytes() == payload(1, 1)
            assert json.loads(mount.log.read_text().splitlines()[0])["mount"] == str(mount.directory)
            found.append(facts_of(mount.pid))
    assert found[0] == found[1]
    assert found[0]["cwd"] == "/"
    assert found[0]["leads its session"]
