"""A lake with one object of every kind, and ways to spoil them one at a time."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path

import trio
from lakework import reclaim

from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.format.node import NodeRecord
from stepfs.lake.control import Group
from stepfs.lake.fleet import write_node
from stepfs.lake.identity import create_lake, open_lake
from stepfs.lake.log.carriers import LEVELS
from stepfs.lake.log.reader import LogReader
from stepfs.lake.log.snapshots import write_snapshot
from stepfs.store.opening import open_store
from stepfs_producer import Producer

STEPS = SEGMENT_STEPS + 18
FIRST = SEGMENT_STEPS - 6  # steps below are reclaimed: the first segment is still needed
KINDS = ("lake.msgpack", "control", "data", "index", "log", "nodes", "snapshot")


def payload(step: int) -> bytes:
    return b"%09d" % step * 9


def build(directory: Path) -> None:
    """Commit, record a checkpoint, reclaim behind it, commit again."""
    url = directory.as_uri()

    async def prepare() -> None:
        store = open_store(url)
        await create_lake(store, slices=1, ext=".bin")
        await store.aclose()

    async def clean_up() -> None:
        store = open_store(url)
        identity = await open_lake(store)
        reader = await LogReader.open(store, identity)
        state = reader.state
        await write_snapshot(store, identity, state, reader.segments, reader.control)  # the second
        await Group.of(store, identity, "g").add(Step(FIRST))
        assert (await reclaim(store, identity)).floor > 0
        record = NodeRecord("g", "host", "/m", 1, "0", Step(state.next_step), Step(0), 0, 1)
        await write_node(store, identity, record)
        await store.aclose()

    trio.run(prepare)
    with Producer(url, producer_id="p") as producer:
        for step in range(SEGMENT_STEPS):
            producer.append([payload(step)], position=step)
    with Producer(url, producer_id="p") as producer:  # its commits come after the first snapshot
        for step in range(SEGMENT_STEPS, STEPS - 8):
            producer.append([payload(step)], position=step)
    trio.run(clean_up)
    # The last three versions carry none, and nothing carries them.
    while (len_of_log(directory) + 1 + 8) % LEVELS[0] != 3:
        with Producer(url, producer_id="p"):
            pass
    with Producer(url, producer_id="p") as producer:
        for step in range(STEPS - 8, STEPS):
            producer.append([payload(step)], position=step)
            producer.flush()


def len_of_log(directory: Path) -> int:
    """How many versions the log has had."""
    return 1 + max(int(Path(key).name) for key in objects(directory)["log"])


def tail_up_to(directory: Path, step: Step) -> set[str]:
    """Keys of the log's versions beyond the newest snapshot without which a new reader does not find `step`.

    None, usually; how many steps a commit holds is the producer's pace.
    """

    async def version_of() -> int:
        store = open_store(directory.as_uri())
        entry = await (await LogReader.open(store, await open_lake(store))).entry(step)
        await store.aclose()
        return entry.version

    found, last = objects(directory), trio.run(version_of)
    snapshot = max(int(Path(key).name.split(".")[0]) for key in found["snapshot"])
    return {key for key in found["log"] if snapshot < int(Path(key).name.split(".")[0]) <= last}


def objects(directory: Path) -> dict[str, list[str]]:
    """Kind → keys in order."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        key = str(path.relative_to(directory))
        match = re.match(r"[0-9a-f]{32}/(\w+)(?:/|$)", key)
        found[match[1] if match else key].append(key)
    assert all(found.values()), f"one of every kind: {found}"
    return found


def copy(source: Path, target: Path) -> None:
    """Hard links: `spoil` replaces a file instead of writing into it."""
    shutil.copytree(source, target, copy_function=os.link)


def spoil(path: Path, how: str, chance: random.Random) -> bytes:
    """Damage one object; returns its bytes before, for `restore`."""
    body = path.read_bytes()
    path.unlink()
    if how == "flip":
        rotten = bytearray(body)
        rotten[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        path.write_bytes(rotten)
    elif how == "truncate":
        path.write_bytes(body[: chance.randrange(len(body))])
    else:
        assert how == "delete"
    return body


def restore(path: Path, body: bytes) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)  # a store removes directories that became empty
    path.write_bytes(body)
