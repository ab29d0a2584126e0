"""A store that accepts connections and says nothing: every command says so soon and ends in bounded time."""

from __future__ import annotations

import socket
import time

import pytest
from lakes import stepfs

from stepfs.store import silence

SAY_S, GIVE_UP_S = 0.2, 0.6
LAKE = "s3://stepfs-tests/lake"


@pytest.fixture
def mute(monkeypatch):
    """The URL of a server that is stopped; commands have less patience than in earnest."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(silence, "SAY_AFTER_S", SAY_S)
    monkeypatch.setattr(silence, "GIVE_UP_AFTER_S", GIVE_UP_S)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    "command", [
        ("init", LAKE, "--slices", "1"), ("ls", LAKE), ("status", LAKE),
        ("checkpoint", LAKE, "--group", "g", "1"), ("reclaim", LAKE), ("seal", LAKE),
        ("fork", f"{LAKE}@1", "s3://stepfs-tests/new"), ("verify", LAKE),
    ], ids=lambda command: command[0],
)  # fmt: skip
def test_a_command_says_that_it_waits_and_gives_up(mute, command):
    started_s = time.monotonic()
    ended = stepfs(*command, "--endpoint-url", mute)
    assert time.monotonic() - started_s < 100  # sixteen time-outs of 20 s without it
    waiting, gave_up = ended.err.splitlines()
    assert waiting == f"stepfs: waiting for {LAKE}: no answer yet; gives up after {GIVE_UP_S:g} s"
    assert gave_up.startswith(f"stepfs: {LAKE}: no answer for {GIVE_UP_S:g} s; check the network")
    assert (ended.code, ended.out) == (6, "")


def test_doctor_finds_it(mute):
    ended = stepfs("doctor", LAKE, "--endpoint-url", mute)
    assert ended.code == 6
    assert f"waiting for {LAKE}" in ended.err
    assert "no answer for 0.6 s" in ended.out
