"""`--dry-run` says exactly what the run after it deletes: object by object, of every kind there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import trio
from doubles.trio_clock import TrioClock
from lakework import reclaim
from producer_world import World
from scenarios import scenario
from small_world import NEED, SEGMENT, checkpoint, clean, grow, litter, process, register, small

from stepfs.format.ids import SegmentIndex
from stepfs.format.keys import extent, index_prefix, log_prefix, numbered, snapshot_prefix
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.lake.reclaim import run as run_room
from stepfs.lake.reclaim.run import CountingRemover, Report
from stepfs.store.api import Entry

GRACE_S = 100.0


async def everything(world: World) -> None:
    """Objects of every kind that a reclaim finds, needed and not."""
    await register(world, "late")
    await grow(world)
    await litter(world)
    world.ledger.release("late")
    await trio.sleep(2 * GRACE_S)
    await checkpoint(world, "late", NEED + 1)
    await checkpoint(world, "run", NEED)
    await trio.sleep(2 * GRACE_S)


def kinds(world: World, keys: set[str]) -> Counter[str]:
    return Counter(key.removeprefix(f"{world.identity.lake_id}/").partition("/")[0] for key in keys)


async def planned(world: World, patch: pytest.MonkeyPatch) -> tuple[Report, set[str]]:
    """What a dry run reports, and the objects that it has counted."""
    named: set[str] = set()

    class Watched(CountingRemover):
        async def remove(self, entries: Sequence[Entry]) -> None:
            assert not named & {entry.key for entry in entries}, "counted twice"
            named.update(entry.key for entry in entries)
            await super().remove(entries)

    with patch.context() as inside:
        inside.setattr("stepfs.lake.reclaim.run.CountingRemover", Watched)
        report = await reclaim(process(world, "dry"), world.identity, dry_run=True, clock=TrioClock(), grace_s=GRACE_S)
    return report, named


async def compare(world: World, patch: pytest.MonkeyPatch) -> Counter[str]:
    """A dry run, and the run; returns how many objects of each kind went."""
    before, requests = dict(world.shared.objects), len(world.shared.trace)
    plan, named = await planned(world, patch)
    assert {event.verb for event in world.shared.trace[requests:]} == {"get", "list"}
    done = await reclaim(process(world, "real"), world.identity, clock=TrioClock(), grace_s=GRACE_S)
    gone = before.keys() - world.shared.objects.keys()
    assert named == gone
    assert plan == done
    assert (plan.deleted_objects, plan.deleted_bytes) == (len(gone), sum(len(before[key]) for key in gone))
    return kinds(world, set(gone))


@scenario(small)
async def test_a_dry_run_names_every_object_that_the_run_deletes(world: World, monkeypatch):
    await everything(world)
    went = await compare(world, monkeypatch)
    assert went.keys() == {"data", "index", "log", "snapshot"}
    assert not await compare(world, monkeypatch), "and nothing is left"


@scenario(small)
async def test_a_dry_run_knows_what_a_killed_reclaimer_left(world: World, monkeypatch):
    """Killed in the middle of deleting: the floor says so already, data, index, log and snapshots are partly there."""
    await everything(world)
    kept = dict(world.shared.objects)
    await clean(world)
    lake_id = world.identity.lake_id
    for key in (
        extent(index_prefix(lake_id), SegmentIndex(NEED // SEGMENT - 1)),
        numbered(log_prefix(lake_id), 2),
        *sorted(key for key in kept if key.startswith(snapshot_prefix(lake_id)))[:1],
        *sorted(key for key in kept if "/data/" in key and key not in world.shared.objects)[:3],
    ):
        world.shared.put(key, kept[key])
    went = await compare(world, monkeypatch)
    assert went.keys() >= {"index", "log", "snapshot"}


@scenario(small)
async def test_a_dry_run_on_a_sealed_lake(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await everything(world)
    await seal(await LogReader.open(process(world, "sealer"), world.identity), TrioClock())
    await compare(world, monkeypatch)


@scenario(small)
async def test_a_dry_run_that_counted_otherwise_would_be_found(world: World, monkeypatch):
    """The mutant: what the run deletes goes unsaid."""
    remove = CountingRemover.remove

    async def unsaid(remover: CountingRemover, entries: Sequence[Entry]) -> None:
        if remover._store is not None:
            await remove(remover, entries)

    monkeypatch.setattr(run_room.CountingRemover, "remove", unsaid)
    await everything(world)
    with pytest.raises(AssertionError):
        await compare(world, monkeypatch)
