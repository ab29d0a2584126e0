"""A fork through the CLI: it reads every byte after its parent let go, lets go of it in turn, and finds it at its own
endpoint.
"""

from __future__ import annotations

import pytest
import trio
from lakes import SLICES, commit, stepfs
from realmount import Mount, mounted, payload, produce, until

from stepfs import StreamState
from stepfs.errors import RefusedError
from stepfs.format.keys import data_prefix
from stepfs.lake.identity import open_lake
from stepfs.store import opening
from stepfs.store.opening import open_store
from stepfs_producer import Producer


def data_objects(url: str) -> int:
    async def count() -> int:
        store = open_store(url)
        found = len(await store.list(data_prefix((await open_lake(store)).lake_id)))
        await store.aclose()
        return found

    return trio.run(count)


def said(*arguments: object) -> str:
    ended = stepfs(*arguments)
    assert ended.code == 0, ended.err
    return ended.out


def read(mount: Mount) -> list[list[bytes]]:
    return [
        [(mount.directory / name / f"rank-{rank:05d}.bin").read_bytes() for rank in (0, 1)] for name in mount.steps()
    ]


def payloads(*steps: int) -> list[list[bytes]]:
    return [[payload(step, index) for index in (0, 1)] for step in steps]


@pytest.mark.timeout(300)
def test_parent_and_fork_let_go_of_each_other(s3_url, tmp_path):
    parent, fork = s3_url, f"{s3_url}-fork"
    said("init", parent, "--slices", 2, "--ext", ".bin")
    produce(parent, 30)
    kept = [*range(15), *range(20, 30)]  # steps 15 to 19 had the loss spike
    group = ["--group", "train"]
    with mounted(parent, tmp_path / "parent", *group) as before:
        assert read(before) == payloads(*range(30))
        assert "a fork of" in said("fork", f"{parent}@12", fork, "--skip", "15:20")
        with mounted(fork, tmp_path / "fork", *group) as after:
            assert read(after) == payloads(*kept)
            lake_id = before.status()["lake_id"]
            assert (before.status()["origins"], after.status()["origins"]) == ({}, {lake_id: 15})
            stream, trained = StreamState.of_mount(after.directory), StreamState.of_mount(before.directory)
            trained.next_step = 15
            stream.load_state_dict(trained.state_dict())
            trained.next_step = 16
            with pytest.raises(RefusedError, match="resume from a checkpoint at 15 or before"):
                stream.load_state_dict(trained.state_dict())
            assert read(before) == payloads(*range(30))  # nothing has changed for those who read the parent

            said("checkpoint", parent, *group, "--retire")
            said("reclaim", parent)
            assert data_objects(fork) == 0  # it shares, it does not copy
        with mounted(fork, tmp_path / "fork", *group) as again:  # with nothing at hand
            assert read(again) == payloads(*kept)
            with Producer(fork, producer_id="p0") as producer:
                assert producer.position == 29, "producers go on where the parent's stood"
                producer.append(payloads(30)[0], position=30)
            until(lambda: len(again.steps()) == 26, "the fork's own step is not shown")
            assert read(again) == payloads(*kept, 30)

            said("checkpoint", again.directory, *group, 25)
            said("reclaim", fork)
            until(lambda: again.steps() == ["step-000000025"], "the view is not behind the checkpoint")
            assert read(again) == payloads(30)
            assert stepfs("status", parent, "--json").document["groups"] == {}  # the fork holds nothing any more

            said("checkpoint", parent, "--group", "end", "--new-group", 30)
            said("reclaim", parent)
            assert data_objects(parent) == 0
            with Producer(parent, producer_id="p0") as producer:  # and the parent goes on, too
                producer.append(payloads(31)[0], position=30)
            until(lambda: before.steps() == ["step-000000030"], "the parent still shows what is gone")
            assert read(before) == payloads(31)
            assert read(again) == payloads(30)


@pytest.mark.parametrize(
    ("command", "code"),
    [(["show", "--step", 0], 5), (["verify"], 0)],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_a_parents_store_is_opened_as_that_of_an_origin(monkeypatch, file_url, tmp_path, command, code):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(2))
    fork = f"file://{tmp_path / 'fork'}"
    assert stepfs("fork", f"{file_url}@2", fork).code == 0
    opened = []
    open_store = opening.open_store

    def noted(url, *, options, silence):
        opened.append((url, options.endpoint_url, options.of_origin))
        return open_store(url, options=options, silence=silence)

    monkeypatch.setattr(opening, "open_store", noted)
    ended = stepfs(command[0], fork, *command[1:], "--endpoint-url", "http://of-the-fork")
    assert ended.code == code, ended.err
    assert set(opened) == {(fork, "http://of-the-fork", False), (file_url, "http://of-the-fork", True)}


def test_a_cut_says_whether_producers_make_again_what_it_leaves_out(file_url: str) -> None:
    assert stepfs("init", file_url, "--slices", 3, "--ext", ".bin").code == 0
    for step in range(4):
        commit(file_url, range(step, step + 1))
    kept = stepfs("fork", f"{file_url}@2", f"{file_url}-kept", "--until", 2)
    assert "they never make it again (with --rewind they do)" in kept.out
    again = stepfs("fork", f"{file_url}@2", f"{file_url}-again", "--until", 2, "--rewind")
    assert "producers go back to step 2, and make the steps from there on again" in again.out
    for name, position in (("kept", 4), ("again", 2)):
        with Producer(f"{file_url}-{name}", producer_id="tok-0") as producer:
            assert producer.position == position
    refused = stepfs("fork", f"{file_url}@2", f"{file_url}-x", "--skip", "2:3", "--rewind")
    assert (refused.code, "--rewind goes with --until alone" in refused.err) == (2, True)
