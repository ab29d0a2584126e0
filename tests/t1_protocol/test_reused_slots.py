"""Log slots that were deleted and are taken again, met through a LIST by a cold start, or by a writer after a reopen.

One mistake lived through every other test here: a reader or writer that floor-checks only what it probed. It needs a
sleeper whom others have left behind.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from doubles.trio_clock import TrioClock
from process_store import ProcessStore
from producer_world import World, append, feed
from scenarios import scenario
from small_world import checkpoint, clean, grow, inside_everywhere, process, small
from test_reader_hazards import move_on, reaches_the_end

from stepfs.errors import RefusedError, SealedError, StoreUnreachableError
from stepfs.format.ids import Version
from stepfs.format.keys import log_prefix, numbered, snapshot_prefix
from stepfs.format.snapshot import LogState, decode_snapshot
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Put
from stepfs_producer.commit import loop as commit_loop
from stepfs_producer.commit.rebase import SealedRefusal


def _newest_snapshot(world: World) -> LogState:
    prefix = snapshot_prefix(world.identity.lake_id)
    key = max(key for key in world.shared.objects if key.startswith(prefix))
    return decode_snapshot(world.shared.objects[key], key)


async def _opens(world: World, store: ProcessStore) -> None:
    await reaches_the_end(world, await LogReader.open(store, world.identity))


async def _a_zombie_follows_the_snapshot(world: World) -> None:
    """All goes on and is reclaimed; then a sleeper takes the slot right after the snapshot a reader may have begun with."""
    await move_on(world, zombie_after=_newest_snapshot(world))


async def _nothing(world: World) -> None:
    del world


def test_hazard_01_a_cold_start_whose_list_shows_a_slot_taken_again() -> None:
    assert inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing) >= 8


def only_probes_are_checked(patch: pytest.MonkeyPatch) -> None:
    """A slot that was not probed (a LIST showed it, or it was taken after a reopen) needs no look at the floor."""
    confirm, read = LogReader.confirm, LogReader._read_listed

    async def untouched(reader: LogReader) -> Version | None:
        lowest = reader._lowest_unconfirmed
        behind = await read(reader)
        reader._lowest_unconfirmed = lowest
        return behind

    patch.setattr(LogReader, "_read_listed", untouched)

    async def believe(reader: LogReader, *, lenient: bool = False) -> bool:
        del lenient
        if reader._lowest_unconfirmed is not None:
            return await confirm(reader)
        await reader.control.refresh()
        reader.state, reader.first_live_step = reader.head, reader.control.first_live_step
        return True

    patch.setattr(LogReader, "confirm", believe)


async def _seals_after_a_reopen(world: World, store: ProcessStore) -> None:
    """What it follows is a zombie's slot, so it starts again from a snapshot, and takes the next slot unprobed."""
    reader = await LogReader.open(process(world, "before"), world.identity)
    await move_on(world, zombie_after=reader.head, chained=False)
    reader.store = store
    with suppress(SealedError):
        await seal(reader, TrioClock())
        assert world.ledger.state.sealed, "who was told that the lake is sealed finds it sealed"


async def _all_goes_on(world: World) -> None:
    """Until every slot that a writer may be about to take is filled, and deleted again."""
    if world.ledger.state.sealed:
        return
    for until in (18, 20, 22):
        async with world.producer("a") as producer:
            await feed(producer, until)
    await checkpoint(world, "run", len(world.ledger.steps))
    await clean(world)


def test_hazard_01_a_slot_taken_right_after_a_reopen_is_floor_checked() -> None:
    """A writer's own slot, never probed: the simulator lost a record so (a producer that followed a zombie's commit)."""
    assert inside_everywhere(grow, _seals_after_a_reopen, _all_goes_on, _nothing) >= 8


def test_mutant_only_probes_are_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    only_probes_are_checked(monkeypatch)
    with pytest.raises(AssertionError, match="another history"):
        inside_everywhere(grow, _opens, _a_zombie_follows_the_snapshot, _nothing)
    with pytest.raises(AssertionError, match="finds it sealed"):
        inside_everywhere(grow, _seals_after_a_reopen, _all_goes_on, _nothing)


@scenario(small, on=grow)
async def test_a_misled_writer_starts_again_though_the_slot_that_misled_it_is_gone(world: World) -> None:
    """Its reopen fails once; meanwhile the slot is deleted, and looks like the free slot behind its stale head."""
    reader = await LogReader.open(process(world, "writer"), world.identity)
    await move_on(world, zombie_after=reader.head, chained=False)
    reopen, failures = reader.reopen, [StoreUnreachableError("503")]

    async def fails_once() -> None:
        if failures:
            raise failures.pop()
        await reopen()

    reader.reopen = fails_once  # type: ignore[method-assign]
    with pytest.raises(StoreUnreachableError):
        await reader.refresh()
    world.shared.remove(numbered(log_prefix(world.identity.lake_id), Version(reader.head.version + 1)))
    await reader.refresh()
    assert reader.head.version == world.ledger.state.version


def _refuses_by_an_error(patch: pytest.MonkeyPatch) -> None:
    """As one whose totals or positions are full."""
    rebase = commit_loop.rebase  # type: ignore[attr-defined]

    def refuse(*arguments: object) -> object:
        made = rebase(*arguments)  # type: ignore[arg-type]
        if isinstance(made, SealedRefusal):
            raise RefusedError("sealed")
        return made

    patch.setattr(commit_loop, "rebase", refuse)


@pytest.mark.parametrize("mutate", [lambda _: None, _refuses_by_an_error], ids=["a value", "an error"])
@scenario(small, on=grow)
async def test_no_producer_is_refused_by_a_slot_that_is_taken_again(world: World, mutate, monkeypatch):
    """A zombie's seal follows what it knows. A refusal would end it, and drop what it holds."""
    mutate(monkeypatch)
    async with world.producer("c", process(world, "c")) as producer:
        known = world.ledger.state
        await _all_goes_on(world)
        await move_on(world, zombie_after=known)
        await append(producer, 0)
    assert world.ledger.published["c"] == 1
    assert producer.tally.lost == 1


@scenario(small, on=grow)
async def test_a_lake_is_not_said_to_be_sealed_because_of_a_slot_that_is_taken_again(world: World) -> None:
    reader = await LogReader.open(process(world, "operator"), world.identity)
    await _all_goes_on(world)
    await move_on(world, zombie_after=reader.head)
    assert await seal(reader, TrioClock())
    assert world.ledger.state.sealed


class Overtaken(ProcessStore):
    """Before its next create in the log another takes the slot; before it looks there, a reclaim deletes that."""

    def __init__(self, world: World) -> None:
        super().__init__(world.shared, actor="c")
        self.world = world
        self.is_next = False

    async def create(self, key: str, body: bytes) -> Put:
        if not self.is_next or "/log/" not in key:
            return await super().create(key, body)
        self.is_next = False
        for who, until in (("a", 20), ("d", 3)):
            async with self.world.producer(who) as producer:
                await feed(producer, until)
        put = await super().create(key, body)
        await checkpoint(self.world, "run", len(self.world.ledger.steps) - 2)
        await clean(self.world)
        assert key not in self.shared.objects
        return put


@scenario(small, on=grow)
async def test_a_slot_that_was_taken_and_is_gone_is_not_taken_again(world: World) -> None:
    store = Overtaken(world)
    async with world.producer("c", store) as producer:
        store.is_next = True
        await append(producer, 0)
    assert world.ledger.published["c"] == 1
    assert producer.tally.lost == 1
    assert world.ledger.counts["zombie slots"] == 0
