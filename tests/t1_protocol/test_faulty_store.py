"""The doubles of store and event loop do what they are for."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext

import deterministic
import pytest
import trio
from deterministic import run_seeded
from doubles import faults
from doubles.faulty_store import Event, FaultyStore, ObjectMap
from trio.testing import MockClock
from virtual_loop import pause

from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.store.api import DELETE_RESENT_S_MAX, Put


def store(*script, **kwargs):
    return FaultyStore(plan=faults.Scripted(list(script)), **kwargs)


@pytest.mark.parametrize(
    ("fault", "outcome", "there"), [
        (faults.LOST_REQUEST, Put.UNKNOWN, False),
        (faults.LOST_RESPONSE, Put.UNKNOWN, True),
        (faults.RESET_BEFORE, Put.UNKNOWN, False), (faults.RESET_AFTER, Put.UNKNOWN, True),
        (faults.ERROR_500, Put.UNKNOWN, False),
        (faults.ERROR_500_APPLIED, Put.UNKNOWN, True),
        (faults.THROTTLED_503, Put.UNKNOWN, False), (faults.CONFLICT_409, Put.RETRY, False),
        (faults.FALSE_412, Put.EXISTS, False), (faults.OWN_412, Put.EXISTS, True),
    ], ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
async def test_what_each_fault_does_to_a_create(autojump_clock, fault, outcome, there):
    one = store(("create", "log/1", fault))
    assert await one.create("log/1", b"mine") is outcome
    assert ("log/1" in one.shared.objects) is there
    assert one.shared.trace[-1].fault == fault.name
    assert await one.create("log/1", b"again") is (Put.EXISTS if there else Put.CREATED)


async def test_a_delayed_create_lands_later_unless_the_slot_is_taken(autojump_clock):
    shared = ObjectMap()
    late = FaultyStore(shared, actor="late", plan=faults.Scripted([("create", "", faults.delayed(5.0))]))
    other = FaultyStore(shared, actor="other")
    assert await late.create("log/1", b"late") is Put.UNKNOWN
    assert await other.get("log/1") is None
    await trio.sleep(5.0)
    assert await other.get("log/1") == b"late"
    landed = [event for event in shared.trace if event.fault == "landed late"]
    assert [(event.actor, event.outcome) for event in landed] == [("late", "created")]

    late.plan = faults.Scripted([("create", "", faults.delayed(5.0))])
    assert await late.create("log/2", b"late") is Put.UNKNOWN
    assert await other.create("log/2", b"other") is Put.CREATED
    await trio.sleep(5.0)
    assert await other.get("log/2") == b"other"
    assert shared.trace[-2].outcome == "exists"


@pytest.mark.parametrize(
    "fault", [faults.LOST_REQUEST, faults.RESET_AFTER, faults.THROTTLED_503], ids=lambda fault: fault.name
)
async def test_other_verbs_are_retried(autojump_clock, fault):
    one = store()
    for verb, call in [
        ("put", lambda: one.put("a", [b"x"])),
        ("get", lambda: one.get("a")),
        ("list", lambda: one.list("")),
        ("delete", lambda: one.delete(["a"])),
    ]:
        plan = one.plan = faults.Scripted([(verb, "", fault)])
        before = getattr(one.counts, verb)
        if verb == "delete" and fault.wait_s > DELETE_RESENT_S_MAX:  # the caller looks, and calls again
            with pytest.raises(StoreUnreachableError, match="no answer to delete a"):
                await call()
        await call()
        assert getattr(one.counts, verb) - before == 2
        assert plan.left == []
    assert one.shared.objects == {}


async def test_what_is_never_answered_is_unreachable(autojump_clock):
    one = FaultyStore(plan=faults.Weighted({faults.LOST_REQUEST: 1.0}))
    with pytest.raises(StoreUnreachableError, match="no answer to get a"):
        await one.get("a")
    assert await one.create("a", b"") is Put.UNKNOWN
    assert one.counts.get == 3


async def test_a_short_body_is_asked_for_again(autojump_clock):
    one = store(("get", "a", faults.SHORT_BODY))
    await one.put("a", [b"x"])
    assert await one.get("a") == b"x"
    assert one.counts.get == 2
    with pytest.raises(CorruptError):
        await one.get("a", bytes_max=0)


@pytest.mark.parametrize("kill_at", range(1, 9))
async def test_a_process_can_be_killed_at_every_await(autojump_clock, kill_at):
    """Four requests, two awaits each: before the second half of its awaits a request was applied, before the first
    half it may still land.
    """
    one = FaultyStore(seed=kill_at)
    with trio.CancelScope() as scope:
        one.kill_at, one.kill = kill_at, scope.cancel
        for number in range(4):
            await one.create(f"log/{number}", b"x")
    assert scope.cancelled_caught
    assert one.pauses == kill_at
    applied_at_once = kill_at // 2
    assert len(one.shared.objects) == applied_at_once
    one.shared.settle(trio.current_time() + 10)
    assert len(one.shared.objects) - applied_at_once in ({0} if kill_at % 2 == 0 else {0, 1})


async def test_a_killed_process_request_lands_for_some_seeds_and_not_for_others(autojump_clock):
    landed = set()
    for seed in range(20):
        one = FaultyStore(seed=seed)
        with trio.CancelScope() as scope:
            one.kill_at, one.kill = 1, scope.cancel
            await one.create("log/1", b"x")
        one.shared.settle(trio.current_time() + 10)
        landed.add(len(one.shared.objects))
    assert landed == {0, 1}


async def simulate(seed: int) -> tuple[str, list[Event], float]:
    shared = ObjectMap()
    probabilities = {fault: 0.05 for fault in vars(faults).values() if isinstance(fault, faults.Fault)}
    rng = random.Random(seed)

    async def process(number):
        one = FaultyStore(shared, actor=f"p{number}", seed=seed, plan=faults.Weighted(probabilities))
        for slot in range(30):
            key = f"log/{slot:04}"
            try:
                outcome = await one.create(key, b"%d" % number)
                body = await one.get(key)
                await one.put(f"data/{number}/{slot}", [b"x" * rng.randrange(100)])
                if outcome is Put.CREATED:
                    assert body in {b"%d" % number, None}
            except StoreUnreachableError:
                continue

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(process, number)
    return shared.digest(), shared.trace, trio.current_time()


def test_the_same_seed_gives_the_same_trace():
    def run(seed):
        return run_seeded(simulate, seed, seed=seed)

    first, second, other = run(7), run(7), run(8)
    assert first[0] == second[0]
    assert first[1] == second[1]
    assert first[0] != other[0]
    assert len(first[1]) > 300
    assert {event.fault for event in first[1]} > {
        "lost request", "409", "short body", "404 for an object that is there",
    }  # fmt: skip


async def test_a_list_and_a_delete_of_several_pages_are_several_requests(autojump_clock):
    """Their pages are of different moments: what appears behind the last page seen is shown, what appears before is not."""
    shared = ObjectMap(objects={f"d/{n}": b"" for n in range(5)}, _keys=[f"d/{n}" for n in range(5)])
    one = FaultyStore(shared, page=2)
    shared.watch = lambda event: shared.put("d/0x", b"") if event.outcome == "2 keys" else None
    assert [entry.key for entry in await one.list("d/")] == [f"d/{n}" for n in range(5)]
    assert one.counts.list == 3
    assert [entry.key for entry in await one.list("d/", after="d/1", limit=3)] == ["d/2", "d/3", "d/4"]
    shared.watch = None
    await one.delete(entry.key for entry in await one.list("d/"))
    assert (one.counts.delete, shared.objects) == (3, {})


async def test_half_a_delete_is_no_answer_and_the_rest_goes_with_the_next_attempt(autojump_clock):
    names = [f"d/{n}" for n in range(20)]
    shared = ObjectMap(objects=dict.fromkeys(names, b""), _keys=sorted(names))
    one = FaultyStore(shared, plan=faults.Scripted([("delete", "", faults.HALF_DELETED)]))
    left = []
    shared.watch = lambda _: left.append(len(shared.objects))
    await one.delete(names)
    assert 0 < left[0] < len(names)
    assert left[1:] == [0]


async def test_a_stale_list_shows_what_stood_then(autojump_clock):
    one = store(("list", "", faults.stale_list(5.0)))
    await one.put("d/old", [b""])
    await one.put("d/kept", [b"x"])
    await trio.sleep(10.0)
    await one.put("d/new", [b""])
    await one.delete(["d/old"])
    assert [entry.key for entry in await one.list("d/")] == ["d/kept", "d/old"]
    assert [entry.key for entry in await one.list("d/")] == ["d/kept", "d/new"]
    assert faults.can_happen(faults.stale_list(1.0), "list")
    assert not faults.can_happen(faults.stale_list(1.0), "get")
    assert not faults.can_happen(faults.HALF_DELETED, "list")


Story = list[tuple[float, str]]
_SHORT_S = (0.0, 0.25, 0.5, 0.5, 1.0)  # so that much ends at the same moment


class _Crowd:
    """Tasks that wait in every way that stepfs knows, for each other too, and note when they come to what."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.story: Story = []
        self.events: list[trio.Event] = []

    def note(self, what: str) -> None:
        self.story.append((trio.current_time(), what))

    def seconds(self) -> float:
        return self.rng.choice((*_SHORT_S, self.rng.uniform(0.0, 2.0)))

    async def main(self) -> Story:
        self.events = [trio.Event() for _ in range(6)]
        send, receive = trio.open_memory_channel[int](2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.reader, receive)
            async with trio.open_nursery() as workers:
                for number in range(6):
                    workers.start_soon(self.worker, number, send)
            send.close()
        return self.story

    async def reader(self, receive: trio.MemoryReceiveChannel[int]) -> None:
        async for number in receive:
            self.note(f"heard {number}")
            await trio.sleep(self.seconds())

    async def worker(self, number: int, send: trio.MemorySendChannel[int]) -> None:
        for turn in range(8):
            await self.wait(number, send)
            self.note(f"{number} after {turn}")
        self.events[number].set()

    async def wait(self, number: int, send: trio.MemorySendChannel[int]) -> None:
        match self.rng.randrange(8):
            case 0 | 1:
                await trio.sleep(self.seconds())
            case 2:
                with trio.move_on_after(self.seconds()):
                    await pause(self.rng.uniform(0.01, 2.0))
            case 3:
                await trio.lowlevel.checkpoint()
            case 4:
                await send.send(number)
            case 5:
                with trio.move_on_after(self.seconds()) as scope:
                    await self.rng.choice(self.events).wait()
                self.note(f"{number} gave up: {scope.cancelled_caught}")
            case 6:
                with trio.move_on_after(self.seconds()) as scope:
                    await trio.sleep(self.seconds())
                self.note(f"{number} was cut short: {scope.cancelled_caught}")
            case _:
                await self.family(number)

    async def family(self, number: int) -> None:
        async def child(name: int, scope: trio.CancelScope) -> None:
            try:
                await trio.sleep(self.seconds())
                self.note(f"child {name} of {number}")
                if self.rng.random() < 0.3:
                    scope.cancel()
                await trio.sleep(self.seconds())
            finally:
                self.note(f"child {name} of {number} ends")

        async with trio.open_nursery() as nursery:
            for name in range(3):
                nursery.start_soon(child, name, nursery.cancel_scope)


def _stories(seeds: range) -> list[Story]:
    return [run_seeded(_Crowd(seed).main, seed=seed) for seed in seeds]


def test_tasks_meet_in_the_order_that_trios_own_loop_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = _stories(range(100))
    monkeypatch.setattr(deterministic, "virtual_loop", nullcontext)
    assert cheap == _stories(range(100))
    assert len({len(story) for story in cheap}) > 10, "the seeds tell different stories"


def test_a_sleep_of_negative_length_is_refused_and_one_without_end_is_cancelled() -> None:
    async def main() -> float:
        with pytest.raises(ValueError, match="non-negative"):
            await trio.sleep(-1)
        with trio.move_on_after(5):
            await trio.sleep(float("inf"))
        return trio.current_time()

    assert run_seeded(main, seed=0) == 5.0


async def test_virtual_time_stands_still_while_a_thread_works(patient_clock: MockClock) -> None:
    with trio.move_on_after(1000) as deadline:
        await trio.to_thread.run_sync(time.sleep, 0.1)
        assert trio.current_time() == 0
        await trio.sleep(999)
        await trio.to_thread.run_sync(time.sleep, 0.1)
        assert trio.current_time() == 999
    assert not deadline.cancelled_caught
