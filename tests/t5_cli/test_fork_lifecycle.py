"""A fork through the CLI: it reads every byte after its parent let go, lets go of it in turn, and finds it at its own
endpoint.
"""

from __future__ import annotations

from pathlib import Path

import json_schemas
import pytest
import trio
from lakes import SLICES, commit, stepfs
from realmount import Mount, lake_with, mounted, payload, produce, until

from stepfs import Lake, ShuffledSteps, StreamState
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


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_parent_and_fork_let_go_of_each_other(s3_url, tmp_path):
    parent, fork = s3_url, f"{s3_url}-fork"
    said("init", parent, "--slices", 2, "--ext", ".bin")
    produce(parent, 30)
    kept = [*range(15), *range(20, 30)]  # steps 15 to 19 had the loss spike
    group = ["--group", "train"]
    with mounted(parent, tmp_path / "parent", *group) as before:
        assert read(before) == payloads(*range(30))
        assert "a fork of" in said("fork", parent, fork, "--skip", "15:20")
        with mounted(fork, tmp_path / "fork", *group) as after:
            assert read(after) == payloads(*kept)
            lake_id = before.status()["lake_id"]
            assert (before.status()["origins"], after.status()["origins"]) == ([], [{"lake_id": lake_id, "cut": 15}])
            stream, trained = StreamState.of_mount(after.directory), StreamState.of_mount(before.directory)
            trained.next_step = 15
            stream.load_state_dict(trained.state_dict())
            trained.next_step = 16
            with pytest.raises(RefusedError, match="resume from a checkpoint at 15 or before"):
                stream.load_state_dict(trained.state_dict())
            assert read(before) == payloads(*range(30))  # nothing has changed for those who read the parent

            said("retire-group", parent, "train")
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
    assert stepfs("fork", file_url, fork).code == 0
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
    kept = stepfs("fork", file_url, f"{file_url}-kept", "--until", 2)
    assert "they never make it again (with --rewind they do)" in kept.out
    again = stepfs("fork", file_url, f"{file_url}-again", "--until", 2, "--rewind")
    assert "producers go back to step 2, and make the steps from there on again" in again.out
    for name, position in (("kept", 4), ("again", 2)):
        with Producer(f"{file_url}-{name}", producer_id="tok-0") as producer:
            assert producer.position == position
    refused = stepfs("fork", file_url, f"{file_url}-x", "--skip", "2:3", "--rewind")
    assert (refused.code, "--rewind goes with --until alone" in refused.err) == (2, True)


def test_a_fork_of_a_sealed_lake_by_a_mesh_in_an_announced_order(file_url):
    """The fork takes steps again; each rank of the mesh reads those of both lakes, shuffled, up to the fork's own seal."""
    lake_with(file_url, 8, slices=4)
    assert stepfs("seal", file_url).code == 0
    fork = f"{file_url}-fork"
    assert stepfs("fork", file_url, fork, "--skip", "6:").code == 0
    produce(fork, 3, slices=4, producer="p1")  # its steps 6 to 8
    assert stepfs("seal", fork).code == 0
    made = {step: (step if step < 6 else step - 6) for step in range(9)}
    with Lake(fork, mesh="dp=4,tp=2", ranks=[3], steps="2:9") as lake:
        order = list(ShuffledSteps(lake, seed=5))
        assert sorted(order) == list(range(7))
        for place in order:
            assert bytes(lake[2 + place][3]) == payload(made[2 + place], 1)
    assert stepfs("checkpoint", fork, "--group", "g", 9, "--new-group").code == 0  # at the end, where nothing is left
    assert stepfs("checkpoint", fork, "--group", "g", 10).code == 2
    assert stepfs("reclaim", fork, "--grace", "0").code == 0
    assert stepfs("ls", fork).out == ""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, str, str]:
    """The parent's directory, its URL, and that of a fork that shares steps 0 to 2."""
    parent, fork = tmp_path / "parent", (tmp_path / "fork").as_uri()
    assert stepfs("init", parent.as_uri(), "--slices", SLICES, "--ext", ".bin").code == 0
    commit(parent.as_uri(), range(5))
    assert stepfs("fork", parent.as_uri(), fork, "--skip", "3:").code == 0
    commit(fork, range(5, 7))
    return parent, parent.as_uri(), fork


def moved(parent: Path) -> str:
    parent.rename(parent.with_name("elsewhere"))
    return "no lake is there"


def replaced(parent: Path) -> str:
    moved(parent)
    assert stepfs("init", parent.as_uri(), "--slices", SLICES).code == 0
    return f"lake {stepfs('ls', parent.as_uri(), '--json').document['lake_id']} is there"


@pytest.mark.parametrize("lose", [moved, replaced])
def test_it_is_named_and_nobody_advises_to_drop_the_history(places, lose):
    parent, url, fork = places
    shared = stepfs("status", url, "--json").document["lake_id"]
    before = stepfs("status", fork, "--json").document
    assert (before["origins"], before["problems"]) == ([{"url": url, "lake_id": shared, "cut": 3}], [])
    assert stepfs("verify", fork).code == 0
    line = f"this fork shares steps with lake {shared}, which belongs at {url}, and {lose(parent)}: put it back there"

    after = stepfs("status", fork, "--json").document
    json_schemas.check("status-lake", after)
    assert after["problems"] == [line]
    assert f"problem   {line}\n" in stepfs("status", fork).out
    told = [one for one in stepfs("doctor", fork, "--json").document["findings"] if one["subject"] == "origin"]
    assert [(one["level"].lower(), one["detail"]) for one in told] == [("fail", line)]

    found = stepfs("verify", fork, "--json")
    assert found.code == 5
    [error] = found.document["errors"]
    assert error["problem"].startswith("3 steps from 0 to 2 cannot be checked: ")
    assert error["problem"].endswith(line)
    assert found.document["advice"] == []
    assert found.document["steps"] == 2, "the fork's own are checked"

    with Lake(fork, deadline=20) as lake:
        assert bytes(lake[3][0])
        with pytest.raises(RefusedError, match=r"data/.*\.tgb: this fork shares steps") as refused:
            bytes(lake[1][0])
        assert line in str(refused.value)
        parent.with_name("elsewhere").rename(parent) if lose is moved else None


def test_it_is_looked_at_once(places, monkeypatch):
    _, url, fork = places
    from stepfs.store.local.local_store import LocalStore  # noqa: PLC0415

    looked, get = [], LocalStore.get

    async def counted(store, key, **options):
        if store.url == url:
            looked.append(key)
        return await get(store, key, **options)

    monkeypatch.setattr(LocalStore, "get", counted)
    with Lake(fork, prefetch=0) as lake:  # those that are fetched ahead may all look before the first is answered
        for step in (0, 1, 2, 1):
            bytes(lake[step][0])
    assert looked == ["lake.msgpack"]
