"""Writers far from the store beside producers near it: nobody is locked out of the log (`stepfs.lake.log.quiet`)."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import trio
from doubles.faulty_store import FaultyStore
from doubles.trio_clock import TrioClock
from producer_world import World, append, simulate

from stepfs.errors import RefusedError
from stepfs.lake.log.append import retire_producer, seal
from stepfs.lake.log.quiet import EVERY_S, QUIET_S, QuietTimes
from stepfs.lake.log.reader import LogReader
from stepfs_producer import AsyncProducer

NEAR_S = 0.01  # a request
SECONDS = 200.0
DAY_S = 86_400.0 + 13.0  # a day is a whole number of turns
WAITS = "has waited .* s: producers nearer to the store commit all the time"


@dataclass(frozen=True, slots=True)
class Shifted:
    """A wall clock that is wrong, and perhaps too fast."""

    by_s: float
    rate: float = 1.0

    def now_ms(self) -> int:
        honest_ms = TrioClock().now_ms()
        return honest_ms + int(self.by_s * 1000 + trio.current_time() * 1000 * (self.rate - 1))


@dataclass
class Tally:
    """What one producer came to."""

    appended: int = 0
    committed: int = 0
    commits: int = 0
    longest_s: float = 0.0  # between two looks that found more committed


def at(world: World, who: str, latency_s: float) -> FaultyStore:
    def latency(_verb: str, _size: int, rng: random.Random) -> float:
        return latency_s * rng.uniform(0.9, 1.1)

    return FaultyStore(world.shared, actor=who, latency=latency)


async def produce(world: World, who: str, latency_s: float, period_s: float, tally: Tally, clock: Shifted) -> None:
    store = at(world, who, latency_s)
    async with AsyncProducer("memory://", producer_id=who, store=store, clock=clock) as producer:
        moved_s = trio.current_time()
        while True:
            await append(producer, tally.appended)
            tally.appended += 1
            await trio.sleep(period_s)
            if producer.committed_seq > tally.committed:
                moved_s = trio.current_time()
            tally.longest_s = max(tally.longest_s, trio.current_time() - moved_s)
            tally.committed, tally.commits = producer.committed_seq, producer.tally.commits


def side_by_side(
    nears: int, far_s: float | None, clocks: Callable[[str], Shifted], *, seconds: float = SECONDS
) -> dict[str, Tally]:
    """Near producers that always have something pending, and from their second second on a far one."""

    async def scenario(world: World) -> dict[str, Tally]:
        tallies = {f"near {number}": Tally() for number in range(nears)}
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + seconds
            for who, tally in tallies.items():
                nursery.start_soon(produce, world, who, NEAR_S, 0.03 * nears, tally, clocks(who))
            await trio.sleep(1.0)
            if far_s is not None:
                tallies["far"] = Tally()
                nursery.start_soon(produce, world, "far", far_s, 1.0, tallies["far"], clocks("far"))
            await trio.sleep_forever()
        assert not world.ledger.broken, world.ledger.broken
        return tallies

    return simulate(scenario, seed=nears)


def honest(_who: str) -> Shifted:
    return Shifted(0.0)


def unlucky(_who: str) -> Shifted:
    """The far one starts late in the run, which ends just before a quiet time: all since the one before is uncommitted."""
    return Shifted(19.0)


def all_wrong(who: str) -> Shifted:
    return Shifted({"far": -DAY_S, "near 0": DAY_S, "near 1": -DAY_S}.get(who, 7.0))


@pytest.mark.logs(WAITS)
@pytest.mark.parametrize(
    ("nears", "far_s", "clocks", "share"), [
        (1, 0.1, honest, 0.94), (1, 0.2, unlucky, 0.83), (3, 0.1, all_wrong, 0.85), (3, 0.2, honest, 0.94),
    ],
)  # fmt: skip
def test_a_far_producer_commits_what_it_appends_and_near_ones_no_less(nears, far_s, clocks, share):
    """Without quiet times the far one does not even start."""
    tallies = side_by_side(nears, far_s, clocks)
    far = tallies.pop("far")
    assert far.appended >= 150
    assert far.committed >= share * far.appended
    for near in tallies.values():
        assert near.committed >= 0.99 * near.appended, "what it commits without the far one, for nothing holds it back"
        assert near.longest_s <= QUIET_S + 0.5


@pytest.mark.logs(WAITS)
def test_mutant_nobody_is_silent(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The start goes on where an operator gives up, and says so once."""
    monkeypatch.setattr(QuietTimes, "note", lambda *_: None)
    assert side_by_side(1, 0.1, honest, seconds=6 * EVERY_S)["far"] == Tally()
    assert [record.args[0] for record in caplog.records] == ["the start of producer 'far'"]  # type: ignore[index]


@pytest.mark.parametrize("rate", [1.0, 100.0, -1.0])
def test_no_clock_stops_a_producer(rate: float) -> None:
    """At 100 s a second each commit may begin another quiet time; at -1 the log's time stands still."""
    near = side_by_side(1, None, lambda _who: Shifted(0.0, rate), seconds=100.0)["near 0"]
    assert near.committed >= 0.99 * near.appended
    assert near.longest_s <= QUIET_S + 0.5
    assert near.longest_s >= QUIET_S or rate != 1.0, "alone it is silent, too: who needs it may be on the way"
    assert near.commits >= 0.75 * 100.0 / 0.03


def test_a_stream_with_gaps_is_never_silent() -> None:
    async def scenario(world: World) -> float:
        longest_s = 0.0
        async with world.producer("p") as producer:
            for number in range(40):
                await trio.sleep(3.5)
                appended_s = trio.current_time()
                await append(producer, number)
                await producer.flush()
                longest_s = max(longest_s, trio.current_time() - appended_s)
        return longest_s

    assert simulate(scenario) < 0.2


async def beside_ten_commits_a_second(world: World, work: Callable[[LogReader], Awaitable[object]]) -> float:
    """An operator 100 ms from the store, who comes at the end of a quiet time: how long it takes."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(produce, world, "near", NEAR_S, 0.1, Tally(), Shifted(0.0))
        async with world.producer("gone"):
            pass
        await trio.sleep(43.5)
        began_s = trio.current_time()
        await work(await LogReader.open(at(world, "operator", 0.1), world.identity))
        nursery.cancel_scope.cancel()
        return trio.current_time() - began_s


async def seals(reader: LogReader) -> None:
    assert await seal(reader, TrioClock())


async def retires(reader: LogReader) -> None:
    assert await retire_producer(reader, "gone", TrioClock())


@pytest.mark.logs(WAITS)
@pytest.mark.parametrize(("work", "what"), [(seals, "the seal"), (retires, "the retirement of 'gone'")])
def test_an_operator_waits_for_a_quiet_time_and_says_so_once(work, what, caplog):
    assert EVERY_S / 2 < simulate(lambda world: beside_ten_commits_a_second(world, work)) <= EVERY_S + QUIET_S
    assert [what in record.getMessage() for record in caplog.records if "has waited" in record.msg] == [True]


@pytest.mark.logs(WAITS)
def test_an_operator_who_never_wins_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuietTimes, "note", lambda *_: None)
    waited_s = []

    async def gives_up(reader: LogReader) -> None:
        began_s = trio.current_time()
        with pytest.raises(RefusedError, match="through 4 quiet times"):
            await seals(reader)
        waited_s.append(trio.current_time() - began_s)

    simulate(lambda world: beside_ten_commits_a_second(world, gives_up))
    assert 4 * EVERY_S < waited_s[0] < 4.5 * EVERY_S
