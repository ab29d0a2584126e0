"""A lake whose texts somebody chose with care, or whose times no calendar has: no command breaks, and no terminal is
steered.
"""

from __future__ import annotations

import pytest
import trio
from lakes import SLICES, commit, stepfs

from stepfs._internal.clock import SystemClock
from stepfs.cli.columns import time_text
from stepfs.cli.commands.status import producer_lines
from stepfs.format import codec
from stepfs.format.codec import Kind
from stepfs.format.ids import INTEGER_MAX
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store

HOSTILE = "tok\x1b]0;owned\x07\x1b[2J\u202e\nproducer"


@pytest.fixture
def lake(file_url, monkeypatch):
    monkeypatch.setattr("stepfs_producer.commit.producer.check_id", lambda name, _: name)  # as no honest writer would
    monkeypatch.setattr("stepfs.lake.control.check_group", lambda name, _: name)
    stepfs("init", file_url, "--slices", 3)
    commit(file_url, range(3), producer_id=HOSTILE)
    stepfs("checkpoint", file_url, "--group", HOSTILE, "--new-group", 1)
    return file_url


def harmless(text):
    return all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("command", [["status"], ["ls"], ["verify"], ["doctor"], ["reclaim", "--dry-run"]])
def test_no_escape_sequence_reaches_the_terminal(lake, command):
    ended = stepfs(command[0], lake, *command[1:])
    assert ended.code == 0
    assert harmless(ended.out + ended.err)


def test_a_document_keeps_the_name_as_it_is(lake):
    ended = stepfs("status", lake, "--json")
    assert HOSTILE in ended.document["producers"]
    assert harmless(ended.out)


@pytest.mark.parametrize("ext", [".pt/../../x", "/etc", ".\x1b[2J", ".p t", "..", ".pt\n", "." + "x" * 300, ""])
def test_an_extension_cannot_leave_the_step_directory(file_url, ext):
    async def write():
        store = open_store(file_url)
        await create_lake(store, slices=1, ext=".pt")
        fields = codec.decode(Kind.LAKE, await store.get("lake.msgpack"), "x")._map
        await store.delete(["lake.msgpack"])
        body = {**fields, "ext": ext}
        await store.put("lake.msgpack", [codec.encode(Kind.LAKE, body)])
        await store.aclose()

    trio.run(write)
    ended = stepfs("ls", file_url)
    assert ended.code == 5
    assert harmless(ended.err)


FAR_MS = 10**15  # 10^12 seconds: the year 33658
LAST_OF_9999_MS = 253_402_300_799_000


@pytest.mark.parametrize(
    ("time_ms", "text"), [
        (0, "-"), (1, "1970-01-01T00:00:00Z"),
        (LAST_OF_9999_MS, "9999-12-31T23:59:59Z"),
        (LAST_OF_9999_MS + 1000, "253402300800 s"), (FAR_MS, "1000000000000 s"),
        (INTEGER_MAX, f"{INTEGER_MAX // 1000} s"), (10**40, f"{10**37} s"), (-(10**40), f"{-(10**37)} s"),
    ],
)  # fmt: skip
def test_any_number_has_a_text(time_ms: int, text: str) -> None:
    assert time_text(time_ms) == text


def test_the_screen_of_a_lake_shows_a_producer_whose_clock_is_wrong() -> None:
    producers = {"p": {"epoch": 1, "next_seq": 1, "time": FAR_MS / 1000}}
    assert "1000000000000 s" in "\n".join(producer_lines(producers, 1_700_000_000_000))


def test_status_and_ls_show_steps_of_a_producer_whose_clock_is_wrong(file_url, tmp_path, monkeypatch):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(2), producer_id="right")
    with monkeypatch.context() as wrong:
        wrong.setattr(SystemClock, "now_ms", lambda _self: FAR_MS)
        commit(file_url, range(1), producer_id="wrong")
    shown = stepfs("status", file_url)
    assert shown.code == 0, shown.err
    [line] = [line for line in shown.out.splitlines() if line.startswith("wrong ")]
    assert "1000000000000 s" in line
    assert stepfs("ls", file_url, "--step", 2, "--json").code == 0
