"""`stepfs verify` names the object that has rotted, whichever it is and however it happened."""

from __future__ import annotations

import random
import threading

import pytest
import rottenlake
import trio
from lakes import stepfs
from lakework import reclaim

from stepfs.errors import RefusedError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.apply import read_versions
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify import metadata
from stepfs.lake.verify.lake import verify_lake
from stepfs.store.local.local_store import LocalStore
from stepfs.store.opening import open_store

# What comes last in its sequence is not missed: without it the lake is what it was before. Nobody's data hangs on a
# node's record, and a group that nobody remembers needs nothing.
UNSEEN = {"control", "log"}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rot") / "intact"
    rottenlake.build(directory)
    return directory


def test_nothing_is_wrong_with_the_lake_that_is_spoilt_below(intact):
    ended = stepfs("verify", intact.as_uri(), "--json")
    document = ended.document
    assert document.pop("bytes") > 0
    assert document == {"schema": 1, "steps": 24, "slices": 24, "errors": [], "advice": []}


@pytest.mark.logs("is unreadable, using an older one", "cannot follow|is damaged|cannot be read")
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("kind", rottenlake.KINDS)
def test_the_object_is_named(intact, tmp_path, kind, how):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)
    keys = rottenlake.objects(lake)[kind]
    if kind == "data":  # the others differ in what hangs on them; these are a step's each
        keys = [*keys[:2], *keys[len(keys) // 2 :][:2], *keys[-2:]]
        assert len(set(keys)) == 6
    for number, key in enumerate(keys):
        chance = random.Random(f"{kind}/{how}/{number}")
        body = rottenlake.spoil(lake / key, how, chance)
        ended = stepfs("verify", lake.as_uri(), "--json")
        told = ended.out + ended.err
        if how == "delete" and kind in UNSEEN and key == keys[-1]:
            assert ended.code in {0, 5}, told
        elif kind == "nodes":
            assert ended.code == 0, "what a mount said of itself; nobody relies on it"
        elif kind == "snapshot" and how == "delete":
            assert ended.code == 0, "everybody starts from the other one"
        elif kind == "control" and key != keys[-1]:
            assert (ended.code, key in told) == (0, True), "nobody reads it, and it never goes"
        else:
            assert ended.code == (3 if (kind, how) == ("lake.msgpack", "delete") else 5), f"{key}: {told}"
            assert key in told
        rottenlake.restore(lake / key, body)
    assert stepfs("verify", lake.as_uri()).code == 0


def test_without_any_snapshot_the_lake_cannot_be_opened(intact, tmp_path):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)
    keys = rottenlake.objects(lake)["snapshot"]
    assert len(keys) == 2
    for key in keys:
        (lake / key).unlink()
    ended = stepfs("verify", lake.as_uri())
    assert ended.code == 5
    told = ended.out + ended.err
    assert "to do: restore the newest object under snapshot/" in told
    assert "stepfs fork" not in told  # there is nothing that it could begin from


def unreadable(path):
    """The operating system refuses it: a link to itself."""
    path.unlink()
    path.symlink_to(path)


def test_an_object_that_cannot_be_read_does_not_stop_the_others(intact, tmp_path):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)
    keys = rottenlake.objects(lake)["data"]
    unreadable(lake / keys[0])
    spoilt = keys[-1]
    rottenlake.spoil(lake / spoilt, "truncate", random.Random(0))
    ended = stepfs("verify", lake.as_uri(), "--json")
    assert (ended.code, ended.document["steps"]) == (5, 24)
    assert {error["key"] for error in ended.document["errors"]} == {keys[0], spoilt}


@pytest.mark.parametrize("live", [3, 24])
def test_when_no_object_can_be_read_it_is_not_the_objects(intact, tmp_path, live):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)
    reclaim_to(lake, rottenlake.STEPS - live)
    for path in list(lake.glob("*/data/**/*.tgb")):
        unreadable(path)
    ended = stepfs("verify", lake.as_uri())
    assert (ended.code, ended.err.count("\n")) == (4, 1), ended


def test_damage_is_told_though_nothing_else_can_be_read(intact, tmp_path, monkeypatch):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)
    found = rottenlake.objects(lake)
    rottenlake.spoil(lake / found["control"][0], "flip", random.Random(0))
    for path in list(lake.glob("*/data/**/*.tgb")):
        unreadable(path)
    get = LocalStore.get

    async def refuses(store, key, **options):
        if key in found["index"]:
            raise RefusedError("permission denied")
        return await get(store, key, **options)

    monkeypatch.setattr(LocalStore, "get", refuses)
    ended = stepfs("verify", lake.as_uri(), "--json")
    assert ended.code == 5
    told = {error["key"]: error["problem"] for error in ended.document["errors"]}
    assert "cannot be read" in told[found["index"][0]]
    assert found["control"][0] in told


def test_what_is_reclaimed_meanwhile_is_no_damage(intact, tmp_path):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)

    async def verify():
        store = open_store(lake.as_uri())
        log = await LogReader.open(store, await open_lake(store))
        reclaim_to(lake, rottenlake.STEPS - 2)  # and with it an index segment
        found = await verify_lake(log, origins=OriginStores(log.store, open_store))
        await store.aclose()
        return found

    found = trio.run(verify)
    assert not found.errors
    assert found.steps < 24


def test_commits_behind_one_that_was_reclaimed_meanwhile_are_checked(intact, tmp_path, monkeypatch):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)

    def read_late(*arguments):
        monkeypatch.setattr(metadata, "read_versions", read_versions)
        reclaim_to(lake, rottenlake.STEPS - 2)
        rottenlake.spoil(lake / newest, "flip", random.Random(0))
        return read_versions(*arguments)

    async def verify():
        store = open_store(lake.as_uri())
        found = await metadata.verify_metadata(store, await open_lake(store))
        await store.aclose()
        return found

    first, *_, newest = rottenlake.objects(lake)["log"]
    monkeypatch.setattr(metadata, "read_versions", read_late)
    assert [damage.key for damage in trio.run(verify)] == [newest]
    assert not (lake / first).exists()  # it had been listed


def reclaim_to(lake, step):
    """In a thread of its own: there may be a loop in this one."""

    async def run():
        store = open_store(lake.as_uri())
        identity = await open_lake(store)
        await Group.of(store, identity, "g").add(Step(step), keep=1)
        await reclaim(store, identity)
        await store.aclose()

    thread = threading.Thread(target=trio.run, args=[run])
    thread.start()
    thread.join()
