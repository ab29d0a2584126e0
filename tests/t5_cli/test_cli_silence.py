"""A store that accepts connections and says nothing: every command says so soon and ends in bounded time."""

from __future__ import annotations

import socket
import time

import pytest
import trio
from lakes import stepfs

from stepfs.errors import StoreUnreachableError
from stepfs.store import silence
from stepfs.store.silence import Silence

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
    "command",
    [
        ("init", LAKE, "--slices", "1"),
        ("ls", LAKE),
        ("status", LAKE),
        ("checkpoint", LAKE, "--group", "g", "1"),
        ("reclaim", LAKE),
        ("seal", LAKE),
        ("fork", f"{LAKE}@1", "s3://stepfs-tests/new"),
        ("verify", LAKE),
    ],
    ids=lambda command: command[0],
)
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


def watched(heard, **bounds):
    return Silence(heard.append, **{"say_after_s": 0.1, "give_up_after_s": 0.4, **bounds})


async def test_signs_of_life_keep_a_long_request_alive():
    heard = []
    watch = watched(heard)

    async def slow():
        for _ in range(12):
            await trio.sleep(0.05)
            watch.note_sign_of_life()
        return "done"

    assert await watch.watch("s3://x", slow) == "done"
    assert len(heard) <= 1


async def test_the_line_is_said_once_for_all_that_wait_together():
    heard = []
    watch = watched(heard)

    async def ask():
        with pytest.raises(StoreUnreachableError, match=r"no answer for 0\.4 s"):
            await watch.watch("s3://x", trio.sleep_forever)

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert heard == ["waiting for s3://x: no answer yet; gives up after 0.4 s"]


async def test_what_cannot_be_abandoned_reports_how_it_ended():
    async def create():
        with trio.CancelScope(shield=True):
            await trio.sleep(0.6)
        return "created"

    assert await watched([]).watch("s3://x", create) == "created"


async def test_after_its_end_nobody_is_hurried():
    heard = []
    watch = watched(heard)

    async def slow():
        watch.end()  # with this request under way
        await trio.sleep(0.6)
        return "done"

    assert await watch.watch("s3://x", slow) == "done"
    assert await watch.watch("s3://x", slow) == "done"
    assert heard == []


async def test_errors_pass_as_themselves():
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await watched([]).watch("s3://x", fail)
