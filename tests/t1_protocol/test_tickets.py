"""Steps that are uploaded elsewhere under tickets: in the order of the tickets, each once, and only what fits its ticket.

Hazard P4: a constructor is lost, or late, or confused: its descriptor must not stand for another step, nor its object for
the one that its successor made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import trio
from doubles.faulty_store import FaultyStore
from lakework import reclaim
from ledger import payload
from producer_world import SLICES, World, append, caught, feed, simulate
from scenarios import scenario

from stepfs.errors import FencedError, UsageError
from stepfs.format.ids import Step
from stepfs.format.tgb import Descriptor, SliceRef, build, pack_slices
from stepfs.lake.control import Group
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer
from stepfs_producer.commit import uploads as pending
from stepfs_producer.commit.uploads import Ticket, descriptor_of


async def reserve(producer: AsyncProducer, number: int) -> Ticket:
    return await producer.reserve(position=number + 1, payload_bytes=100)


async def put(
    producer: AsyncProducer, store: FaultyStore, ticket: Ticket, number: int, *, other: bytes = b""
) -> Descriptor:
    """What a worker does. `other`: it makes another step than it should."""
    batch = [other + payload(producer.producer_id, number, index) for index in range(SLICES)]
    image = build(
        lake_id=producer.lake.lake_id,
        producer_id=producer.producer_id,
        epoch=producer.epoch,  # type: ignore[arg-type]
        seq=ticket.seq,
        payloads=batch,
        records=[1] * SLICES,
    )
    await store.put(ticket.key, image.parts, crc32c=image.crc32c)
    return descriptor_of(image, ticket.key, ticket.seq)


async def readable(world: World, steps: int) -> None:
    """Every step of p has the bytes that its number says, as checksums and as contents."""
    store = world.store("reader")
    reader = await LogReader.open(store, world.identity)
    for step in range(steps):
        tgb = (await reader.entry(Step(step))).tgb
        body = await store.get(tgb.key)
        assert body is not None
        for index in range(SLICES):
            place = tgb.slice(index)  # type: ignore[arg-type]
            data = body[place.offset : place.offset + place.length]
            assert data == payload("p", step, index)


async def uploads(world: World) -> int:
    return len(await world.store("lister").list(f"{world.identity.lake_id}/data/"))


@scenario(simulate)
async def test_steps_are_in_the_order_of_their_tickets_whenever_they_are_settled(world: World) -> None:
    async with world.producer("p") as producer:
        store = world.store("worker")
        issued = [await reserve(producer, number) for number in range(5)]
        assert [ticket.seq for ticket in issued] == list(range(5))
        await append(producer, 5)
        for number in (3, 1, 0):
            producer.settle(issued[number], await put(producer, store, issued[number], number))
        await producer.flush()  # up to the first one that is not settled
        assert producer.committed_seq == 2
        for number in (4, 2):
            producer.settle(issued[number], await put(producer, store, issued[number], number))
        await producer.flush()
        assert producer.committed_seq == 6
    world.check(p=6)
    await readable(world, 6)


@scenario(simulate)
async def test_a_reservation_is_given_up_with_its_incarnation(world: World) -> None:
    store = world.store("worker")
    async with world.producer("p") as producer:
        issued = [await reserve(producer, number) for number in range(3)]
        for number in (0, 2):
            producer.settle(issued[number], await put(producer, store, issued[number], number))
    world.check(p=1)
    async with world.producer("p") as producer:
        assert (producer.position, producer.next_seq) == (1, 1)
        with pytest.raises(UsageError, match=r"ticket 1 with key .* is not open"):
            producer.settle(issued[1], await put(producer, store, issued[1], 1))
        await feed(producer, 4)
    world.check(p=4)
    await readable(world, 4)


@scenario(simulate)
async def test_retiring_does_not_wait_for_a_ticket(world: World) -> None:
    async with world.producer("p") as producer:
        await append(producer, 0)
        await reserve(producer, 1)
        with trio.fail_after(60):
            await producer.retire()
    world.check(p=1)


@scenario(simulate)
async def test_a_fenced_producer_settles_nothing(world: World) -> None:
    store = world.store("worker")
    with pytest.raises(FencedError):
        async with world.producer("p") as producer:
            ticket = await reserve(producer, 0)
            tgb = await put(producer, store, ticket, 0)
            async with world.producer("p") as successor:
                await append(successor, 0)
            producer.settle(ticket, tgb)  # it may not know yet
            await producer.flush()
    world.check(p=1)
    await readable(world, 1)


def with_slices(tgb: Descriptor, change: Callable[[SliceRef], SliceRef]) -> Descriptor:
    slices, blocks = pack_slices([change(tgb.slice(index)) for index in range(SLICES)])  # type: ignore[arg-type]
    return replace(tgb, packed_slices=slices, packed_blocks=blocks)


WRONG: dict[str, Callable[[Descriptor, Descriptor], Descriptor]] = {
    "no key of it": lambda mine, other: replace(mine, key=other.key),
    "it is of seq 1": lambda mine, other: replace(other, key=mine.key),
    "no key": lambda mine, _: replace(mine, origin=1),
    "outside its object": lambda mine, _: replace(mine, size=100),
    "1 slices, not 2": lambda mine, _: replace(mine, packed_slices=mine.packed_slices[:24]),
    "slice table of 7 bytes": lambda mine, _: replace(mine, packed_slices=mine.packed_slices[:7]),
    "other numbers of records": lambda mine, _: with_slices(mine, lambda one: replace(one, records=2)),
    "do not fill": lambda mine, _: with_slices(mine, lambda one: replace(one, offset=one.offset + 1)),
    "bytes of block checksums": lambda mine, _: replace(mine, packed_blocks=b"1234"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_descriptor_that_does_not_fit_changes_nothing(why: str) -> None:
    async def run(world: World) -> None:
        async with world.producer("p") as producer:
            store = world.store("worker")
            first, second = await reserve(producer, 0), await reserve(producer, 1)
            one, two = await put(producer, store, first, 0), await put(producer, store, second, 1)
            with pytest.raises(UsageError, match=f"does not fit ticket 0: .*{why}") as refusal:
                producer.settle(first, WRONG[why](one, two))
            assert "\n" not in str(refusal.value)
            producer.settle(second, two)
            producer.settle(first, one)
            with pytest.raises(UsageError, match=r"ticket 0 with key .* is not open"):
                producer.settle(first, one)  # twice
            with pytest.raises(UsageError, match="is not open"):
                producer.renew(first)
        world.check(p=2)

    simulate(run)


@scenario(simulate)
async def test_reservations_wait_as_appends_do_and_count_what_was_uploaded(world: World) -> None:
    async with world.producer("p", max_pending_bytes=1000) as producer:
        store = world.store("worker")
        issued = [await producer.reserve(position=number + 1, payload_bytes=4000) for number in range(2)]
        with trio.move_on_after(100) as waited:
            await reserve(producer, 2)
        assert waited.cancelled_caught, "8 × 1000 are reserved"
        producer.settle(issued[0], await put(producer, store, issued[0], 0))
        with trio.fail_after(100):
            issued.append(await reserve(producer, 2))  # the first one had fewer
        assert producer.next_seq == 3
        for number in (1, 2):
            producer.settle(issued[number], await put(producer, store, issued[number], number))
    world.check(p=3)


async def lost_and_late(world: World) -> None:
    """The constructor of step 1 uploads and is not heard of; its successor makes the step, from other bytes than it; then
    the lost one, which only hung, uploads again."""
    async with world.producer("p") as producer:
        store = world.store("worker")
        issued = [await reserve(producer, number) for number in range(3)]
        await put(producer, store, issued[1], 1, other=b"?")
        again = producer.renew(issued[1])
        for number in (0, 2):
            producer.settle(issued[number], await put(producer, store, issued[number], number))
        producer.settle(issued[1], await put(producer, store, again, 1))
        await put(producer, store, issued[1], 1, other=b"?")
    world.check(p=3)
    await readable(world, 3)


@scenario(simulate)
async def test_hazard_p4_a_lost_constructor_shows_in_no_step_and_its_object_is_an_orphan(world: World):
    await lost_and_late(world)
    assert await uploads(world) == 4
    store = world.store("reclaimer")
    await trio.sleep(10 * 24 * 3600)  # beyond any grace
    await Group.of(store, world.identity, "trainer").add(Step(0), keep=1)
    await reclaim(store, world.identity)
    assert await uploads(world) == 3
    await readable(world, 3)


@scenario(simulate)
async def test_hazard_p4_a_second_constructor_under_the_same_key_is_caught(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch, caught():
        patch.setattr(AsyncProducer, "renew", lambda _producer, ticket: ticket)
        await lost_and_late(world)


@scenario(simulate)
async def test_hazard_p4_a_descriptor_of_another_step_that_is_believed_is_caught(world: World) -> None:
    with pytest.MonkeyPatch.context() as patch, caught():
        patch.setattr(pending, "_misfits", lambda _found, _tgb: iter(()))
        async with world.producer("p") as producer:
            store = world.store("worker")
            issued = [await reserve(producer, number) for number in range(2)]
            made = [await put(producer, store, issued[number], number) for number in range(2)]
            producer.settle(issued[0], made[1])
            producer.settle(issued[1], made[0])
        world.check(p=2)
