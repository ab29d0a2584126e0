"""`stepfs verify` names the object that has rotted, however it happened, and what it says to type then works."""

from __future__ import annotations

import random
import re
import shlex
import threading
from pathlib import Path

import pytest
import rottenlake
import trio
from decoded_once import decoded_once
from lakes import Ended, stepfs
from lakework import reclaim

from stepfs.errors import RefusedError
from stepfs.format.ids import Step
from stepfs.lake.control import Group
from stepfs.lake.identity import open_lake
from stepfs.lake.log.apply import read_versions
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.lake.verify import metadata
from stepfs.lake.verify.data import verify_lake
from stepfs.store.local.local_store import LocalStore
from stepfs.store.opening import open_store
from stepfs_producer import Producer

# What comes last in its sequence is not missed: without it the lake is what it was before. Nobody's data hangs on a
# node's record, and a group that nobody remembers needs nothing.
UNSEEN = {"control", "log"}


@pytest.fixture(autouse=True)
def _decoded_once():
    """A verification decodes 500 steps of the index; what is spoilt has other bytes, and is decoded."""
    with decoded_once():
        yield


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rot") / "intact"
    rottenlake.build(directory)
    return directory


def test_nothing_is_wrong_with_the_lake_that_is_spoilt_below(intact):
    ended = stepfs("verify", intact.as_uri(), "--json")
    document = ended.document
    assert document.pop("bytes") > 0
    assert (document.pop("lake"), len(document.pop("lake_id"))) == (intact.as_uri(), 32)
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
    if kind == "log":  # those in a row differ in nothing
        keys = [*keys[:2], *keys[2:-2:4], *keys[-2:]]
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


FIRST, STEPS = rottenlake.FIRST, rottenlake.STEPS


@pytest.fixture
def lake(intact, tmp_path):
    rottenlake.copy(intact, tmp_path / "lake")
    return tmp_path / "lake"


def spoilt(lake: Path, kind: str, which: int, how: str = "flip") -> str:
    key = rottenlake.objects(lake)[kind][which]
    rottenlake.spoil(lake / key, how, random.Random(1))
    return key


def told(lake: Path, code: int = 5) -> list[str]:
    """Every command that `verify` says to type."""
    ended = stepfs("verify", lake.as_uri())
    assert ended.code == code, ended
    lines = [line for line in ended.err.splitlines() if line.startswith("to do: ")]
    assert stepfs("verify", lake.as_uri(), "--json").document["advice"] == [
        line.removeprefix("to do: ") for line in lines
    ]
    return [match[1] for line in lines if (match := re.search(r": (stepfs .*)$", line))]


def run(command: str, new: str) -> Ended:
    program, *arguments = shlex.split(command)
    assert program == "stepfs"
    return stepfs(*(new if word == "NEW" else word for word in arguments))


def contents(url: str) -> list[bytes]:
    """The payload of every live step, in order."""

    async def read() -> list[bytes]:
        store = open_store(url)
        reader = await LogReader.open(store, await open_lake(store))
        origins = OriginStores(store, open_store)
        found = []
        for step in range(reader.first_live_step, reader.state.next_step):
            tgb = (await reader.entry(step)).tgb
            ref = tgb.slice(0)
            buffer = bytearray(ref.length)
            await (await origins.of(tgb, reader.state)).read_into(tgb.key, ref.offset, memoryview(buffer))
            found.append(bytes(buffer))
        await origins.aclose()
        await store.aclose()
        return found

    return trio.run(read)


def payloads(*steps: int) -> list[bytes]:
    return [rottenlake.payload(step) for step in steps]


def test_a_damaged_tail_commit_costs_the_steps_from_it_on_and_producers_make_them_again(lake, tmp_path):
    new = (tmp_path / "new").as_uri()
    key = spoilt(lake, "log", -3)
    for command in ("ls", "status"):
        assert stepfs(command, lake.as_uri()).code == 5
    [command] = told(lake)
    assert command.endswith("NEW --until-damage")
    ended = run(command, new)
    assert ended.code == 0, ended.err
    assert f"left out: 3 commits from log version {int(Path(key).name)} on" in ended.out
    assert f"steps {STEPS - 3} to {STEPS - 1}" in ended.out
    assert f"  p: from batch {STEPS - 3}, had committed {STEPS}" in ended.out
    assert contents(new) == payloads(*range(FIRST, STEPS - 3))
    with Producer(new, producer_id="p") as producer:
        assert producer.position == STEPS - 4, "that of the last good commit"
        for step in range(STEPS - 3, STEPS):
            producer.append([rottenlake.payload(step)], position=step)
    assert contents(new) == payloads(*range(FIRST, STEPS))
    assert stepfs("verify", new).code == 0


def test_a_commit_that_is_missing_before_others_is_damage_like_a_flipped_bit(lake, tmp_path):
    new = (tmp_path / "new").as_uri()
    spoilt(lake, "log", -3, "delete")
    assert stepfs("ls", lake.as_uri()).code == 5, "a producer would begin a second history there"
    [command] = told(lake)
    assert run(command, new).code == 0
    assert contents(new) == payloads(*range(FIRST, STEPS - 3))


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (("data", 7, "delete"), [*range(FIRST, FIRST + 7), *range(FIRST + 8, STEPS)]),
        (("index", 0), range(rottenlake.SEGMENT_STEPS, STEPS)),  # type: ignore[attr-defined]
    ],
    ids=["a step", "the segment of the first live steps"],
)
def test_damaged_steps_are_left_out(lake, tmp_path, damage, left):
    new = (tmp_path / "new").as_uri()
    spoilt(lake, *damage)
    [command] = told(lake)
    ended = run(command, new)
    assert ended.code == 0, ended.err
    assert contents(new) == payloads(*left)
    assert stepfs("verify", new).code == 0


@pytest.mark.logs("unreadable, using an older one")
@pytest.mark.parametrize("which", [0, -1])
def test_a_damaged_snapshot_needs_nothing(lake, which):
    spoilt(lake, "snapshot", which)
    assert told(lake) == []
    assert contents(lake.as_uri()) == payloads(*range(FIRST, STEPS))
    with Producer(lake.as_uri(), producer_id="p") as producer:
        assert producer.position == STEPS - 1


@pytest.mark.logs("this process only reads, and goes on from the record before")
def test_a_damaged_newest_control_record_is_continued_by_the_one_before(lake):
    """It was the reclaim's: what it has deleted stays given up."""
    key = spoilt(lake, "control", -1)
    for command in (
        ["reclaim", lake.as_uri()],
        ["checkpoint", lake.as_uri(), "--group", "g", STEPS - 4],
        ["seal", lake.as_uri()],
    ):
        ended = stepfs(*command)
        assert ended.code == 5, "nothing changes while nobody knows what is needed"
        assert f"stepfs verify {lake.as_uri()} --repair" in ended.err
    ended = stepfs("ls", lake.as_uri())
    assert ended.code == 0, ended.err
    [command] = told(lake)
    assert command == f"stepfs verify {lake.as_uri()} --repair"
    ended = run(command, "")
    assert f"control record 1 is damaged; record 2 continues the one before: steps from {FIRST} on" in ended.err
    assert "groups g" in ended.err
    assert (ended.code, key in ended.err) == (0, True), "the damaged object stays, and nobody reads it"
    assert told(lake, 0) == []
    assert "nothing to repair" in run(command, "").err
    assert stepfs("checkpoint", lake.as_uri(), "--group", "g", "--new-group", STEPS - 4, "--keep", "1").code == 0
    assert stepfs("reclaim", lake.as_uri()).code == 0
    assert contents(lake.as_uri()) == payloads(*range(STEPS - 4, STEPS))


@pytest.mark.parametrize("how", ["flip", "delete"])
def test_an_older_control_record_needs_nothing(lake, how):
    spoilt(lake, "control", 0, how)
    assert told(lake, 0) == []
    assert contents(lake.as_uri()) == payloads(*range(FIRST, STEPS))
    assert stepfs("checkpoint", lake.as_uri(), "--group", "g", "--new-group", STEPS - 4, "--keep", "1").code == 0
    assert stepfs("reclaim", lake.as_uri()).code == 0
    assert contents(lake.as_uri()) == payloads(*range(STEPS - 4, STEPS))


def test_until_damage_of_a_whole_lake_leaves_out_nothing(lake, tmp_path):
    new = (tmp_path / "new").as_uri()
    ended = stepfs("fork", lake.as_uri(), new, "--until-damage")
    assert ended.code == 0, ended.err
    assert "log is whole" in ended.out
    assert contents(new) == payloads(*range(FIRST, STEPS))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--until", "515"], range(FIRST, 515)),
        (["--until", "520", "--skip", "515:518"], [*range(FIRST, 515), 518, 519]),
        ([], range(FIRST, STEPS)),
    ],
)
def test_until_cuts_where_step_alone_does_not(lake, tmp_path, options, steps):
    new = (tmp_path / "new").as_uri()
    ended = stepfs("fork", lake.as_uri(), new, *options)
    assert ended.code == 0, ended.err
    assert f"with {len(steps)} steps" in ended.out
    assert contents(new) == payloads(*steps)


@pytest.mark.parametrize("until", [FIRST - 1, STEPS + 1])
def test_until_outside_the_fork_is_refused(lake, tmp_path, until):
    ended = stepfs("fork", lake.as_uri(), (tmp_path / "new").as_uri(), "--until", until)
    assert (ended.code, ended.out) == (2, "")


def test_the_first_sentence_of_the_help_says_that_step_alone_cuts_nothing():
    text = " ".join(stepfs("fork", "--help").out.split())
    assert "ALL steps of the parent, except those that --skip or --until leave out" in text
