"""Steps that workers upload under tickets: the bytes of steps that are appended, whoever dies, is late or is lost."""

from __future__ import annotations

import pickle
from random import Random

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_run import HereEngine, NotedProducer, rules, run, sources_in, write_corpus

from stepfs.errors import UsageError
from stepfs.format.grid import Grid
from stepfs.format.ids import Epoch
from stepfs.format.keys import data_key
from stepfs.format.records import LakeIdentity
from stepfs.format.tgb import Descriptor
from stepfs.store.options import StoreOptions
from stepfs_producer.engine import failover
from stepfs_producer.engine.api import WorkerDied
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.pending import Ticket
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.state import read_position
from stepfs_producer.run.conductor import Conductor, EndReason, RunCallbacks, RunConfig
from stepfs_producer.run.memory import STEPS_PER_WORKER
from stepfs_producer.run.step_builder import ByTicket
from stepfs_producer.run.workers.upload import Destination, put_step

MIX = {"code": 30, "prose": 70}
RULES = rules(MIX, micro_batch_tokens=256)
STEPS = 12
LAKE = LakeIdentity("0" * 32, Grid(2), ".npy", 0, check_payload=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory, "code", 150)
    write_corpus(directory, "prose", 350)
    return directory


class Tickets:
    """A producer that only notes; the store is a directory."""

    def __init__(self, root, *, most: int = 10**6) -> None:
        self.root = root
        self.most = most  # reservations until it lets them wait for ever
        self.reserved: list[tuple[dict, list[int]]] = []
        self.tickets: dict[int, list[Ticket]] = {}
        self.settled: dict[int, Descriptor] = {}
        self.flushed = 0

    async def reserve(self, *, position, records, payload_bytes) -> Ticket:
        await trio.lowlevel.checkpoint()
        if len(self.reserved) == self.most:
            await trio.sleep_forever()
        assert payload_bytes > 0
        self.reserved.append((position, list(records)))
        return self._issue(len(self.reserved) - 1)

    def renew(self, ticket: Ticket) -> Ticket:
        return self._issue(ticket.seq)

    def _issue(self, seq: int) -> Ticket:
        found = Ticket(seq, data_key(LAKE.lake_id, "plan", Epoch(1), seq))
        self.tickets.setdefault(seq, []).append(found)
        return found

    def settle(self, ticket: Ticket, descriptor: Descriptor) -> None:
        assert ticket.seq == descriptor.seq
        assert ticket.seq not in self.settled
        assert descriptor.key in {one.key for one in self.tickets[ticket.seq]}
        self.settled[ticket.seq] = descriptor

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        self.flushed = len(self.settled)

    def sink(self, **lake) -> ByTicket:
        identity = LakeIdentity(**{name: getattr(LAKE, name) for name in LAKE.__slots__} | lake)
        return ByTicket(self, Destination(f"file://{self.root}", StoreOptions(), identity, "plan", Epoch(1)))

    def steps(self) -> list[tuple[list[bytes], dict, list[int]]]:
        found = []
        for seq in sorted(self.settled):
            tgb = self.settled[seq]
            body = (self.root / tgb.key).read_bytes()
            places = [tgb.slice(index) for index in range(tgb.slices)]  # type: ignore[arg-type]
            payloads = [body[place.offset : place.offset + place.length] for place in places]
            position, records = self.reserved[seq]
            assert [place.records for place in places] == records
            found.append((payloads, position, records))
        return found


class LosingConstructors(HereEngine):
    """Some constructors die after their upload, and one may be lost thrice but not more."""

    def __init__(self, seed: int, share: float, **more) -> None:
        super().__init__(seed, **more)
        self.share = share
        self.keys: list[str] = []
        self._draw = Random(seed)
        self._lost: dict[bytes, int] = {}

    async def submit(self, function, *arguments):
        result = await super().submit(function, *arguments)
        if function is not put_step or not isinstance(result, Descriptor):
            return result
        self.keys.append(arguments[3].key)
        step = pickle.dumps(arguments[1].spans)
        if self._draw.random() < self.share and self._lost.get(step, 0) < 2:
            self._lost[step] = self._lost.get(step, 0) + 1
            return WorkerDied("killed")
        return result


async def expected(corpus) -> list:
    producer = NotedProducer()
    await run(HereEngine(0, workers=1), producer, RULES, sources_in(corpus, MIX), steps_max=STEPS)
    return producer.steps


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0, 0.3]),
    st.sampled_from([0, 0.2]),
)
def test_steps_are_those_that_are_appended(corpus, tmp_path_factory, seed, workers, late, share, losses):
    tickets = Tickets(tmp_path_factory.mktemp("lake"))
    engine = LosingConstructors(seed, share, workers=workers, losses=losses)

    async def uploaded() -> list:
        await run(engine, tickets.sink(), RULES, sources_in(corpus, MIX), steps_max=STEPS)
        assert tickets.flushed == STEPS
        return tickets.steps()

    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(failover, "LATE_S_MIN", 0)
            patch.setattr(failover, "LATE_TIMES_MEAN", 0)
        assert trio.run(uploaded) == trio.run(expected, corpus)
    assert len(set(engine.keys)) == len(engine.keys), "no two constructors have one key"
    assert len(list(tickets.root.rglob("*.tgb"))) == len(engine.keys) >= STEPS


async def test_a_stop_leaves_no_step_that_was_not_settled_in_the_totals(corpus, tmp_path) -> None:
    tickets, told = Tickets(tmp_path), []

    def appended(plan, *_) -> None:
        told.append(plan.step)
        if plan.step == 4:
            conductor.stop()

    config = RunConfig(RULES, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258))
    conductor = Conductor(config, HereEngine(4), tickets.sink(), RunCallbacks(appended=appended))
    assert await conductor.run(Planner(RULES).begin()) is EndReason.STOPPED
    assert told == list(range(len(told)))
    settled = [seq for seq in range(len(tickets.reserved)) if seq in tickets.settled]
    certain = next((seq for seq in range(len(settled)) if settled[seq] != seq), len(settled))
    assert len(told) == certain >= 5
    assert (await expected(corpus))[:certain] == tickets.steps()[:certain]


async def test_a_run_goes_on_from_the_last_step_that_was_certain(corpus, tmp_path) -> None:
    whole = await expected(corpus)
    tickets = Tickets(tmp_path)
    position = read_position(whole[4][1]).position()
    await run(HereEngine(1), tickets.sink(), RULES, sources_in(corpus, MIX), steps_max=STEPS, position=position)
    assert tickets.steps() == whole[5:]


async def test_a_producer_that_waits_stops_the_planner(corpus, tmp_path, patient_clock) -> None:
    tickets, planned = Tickets(tmp_path, most=3), []
    config = RunConfig(RULES, sources_in(corpus, MIX), PayloadSpec(".npy", True, 257, 258), steps_max=STEPS)
    engine = HereEngine(0, workers=1)
    conductor = Conductor(
        config, engine, tickets.sink(), RunCallbacks(appended=lambda plan, *_: planned.append(plan.step))
    )
    with trio.move_on_after(5):
        await conductor.run(Planner(RULES).begin())
    assert planned == [0, 1, 2]
    assert len(tickets.settled) == 3
    assert conductor.loaders["code"].held.groups, "samples stay for the steps that wait"
    assert STEPS_PER_WORKER == 2


@pytest.mark.parametrize(
    ("lake", "why"),
    [({"grid": Grid(3)}, "a step of 2 files"), ({"ext": ".tar"}, "payload 0 .*--check-payload")],
)
async def test_a_step_that_breaks_the_lakes_promises_is_refused_in_the_worker(corpus, tmp_path, lake, why):
    tickets = Tickets(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        await run(HereEngine(1), tickets.sink(**lake), RULES, sources_in(corpus, MIX), steps_max=1)
    assert caught.group_contains(UsageError, match=why)
    assert not list(tmp_path.rglob("*.tgb"))
