"""A lake whose texts somebody chose with care: nothing of them steers a terminal or leaves the view."""

from __future__ import annotations

import pytest
import trio
from lakes import commit, stepfs

from stepfs.format import codec
from stepfs.format.codec import Kind
from stepfs.lake.identity import create_lake
from stepfs.store.opening import open_store

HOSTILE = "tok\x1b]0;owned\x07\x1b[2J\u202e\nproducer"


@pytest.fixture
def lake(file_url, monkeypatch):
    monkeypatch.setattr(
        "stepfs_producer.producer.check_id", lambda name, _: name
    )  # as no honest writer would
    monkeypatch.setattr("stepfs.lake.groups.check_id", lambda name, _: name)
    stepfs("init", file_url, "--slices", 3)
    commit(file_url, range(3), producer_id=HOSTILE)
    stepfs("checkpoint", file_url, "--group", HOSTILE, 1)
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


@pytest.mark.parametrize(
    "ext", [".pt/../../x", "/etc", ".\x1b[2J", ".p t", "..", ".pt\n", "." + "x" * 300, ""]
)
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
