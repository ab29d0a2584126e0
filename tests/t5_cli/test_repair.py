"""What `verify` says to type works: each command is copied from its output and run.

One object of each kind is damaged, the lake is asked what to do, and what it says is done.
"""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest
import rottenlake
import trio
from lakes import Ended, stepfs

from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.store.opening import open_store
from stepfs_producer import Producer

FIRST, STEPS = rottenlake.FIRST, rottenlake.STEPS


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("repair") / "intact"
    rottenlake.build(directory)
    return directory


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
    ended = stepfs("fork", f"{lake.as_uri()}@515", new, *options)
    assert ended.code == 0, ended.err
    assert f"with {len(steps)} steps" in ended.out
    assert contents(new) == payloads(*steps)


@pytest.mark.parametrize("until", [514, STEPS + 1])
def test_until_outside_the_fork_is_refused(lake, tmp_path, until):
    ended = stepfs("fork", f"{lake.as_uri()}@515", (tmp_path / "new").as_uri(), "--until", until)
    assert (ended.code, ended.out) == (2, "")


def test_the_first_sentence_of_the_help_says_that_step_alone_cuts_nothing():
    text = " ".join(stepfs("fork", "--help").out.split())
    assert "ALL steps of the parent, except those that --skip or --until leave out" in text
