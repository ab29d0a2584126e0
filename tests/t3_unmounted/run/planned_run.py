"""Runs of small plans in this process: workers that answer in any order and die, and a producer that only notes."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from random import Random

import trio
from declared import source_spec, transform_spec

from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Epoch, SliceIndex
from stepfs.format.keys import data_key
from stepfs.format.tgb import Descriptor
from stepfs.store.api import StoreOptions
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.engine.api import Kept, Lost, WorkerDied
from stepfs_producer.engine.retry import WORKERS_MAX
from stepfs_producer.payloads.step import ColumnSpec, PayloadSpec
from stepfs_producer.plan.mix import MixEntry, MixSchedule, Stages, normalise
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.rules import Rules, SourceRule
from stepfs_producer.plan.step import State, read_position
from stepfs_producer.run.load import LoadedSource
from stepfs_producer.run.pipeline import EndReason, Pipeline, RunCallbacks, RunConfig, StepSink
from stepfs_producer.run.workers.upload import Destination, put_step
from stepfs_producer.sources.listing import Layout, list_corpus

LAKE_ID = "0" * 32
_TOLD_MAX = 50  # tasks side by side may need one body


class HereReference:
    """A body of `HereEngine`: pickled, until it is released or lost."""

    def __init__(self, body: object) -> None:
        data = pickle.dumps(body)
        self.body: bytes | None = data
        self.nbytes = len(data)
        self.released = False
        self.told = 0  # how often a task that needed it was told that it is lost


class HereEngine:
    """Carries tasks out in this process, after a random number of other tasks' turns; some workers die, some bodies are
    lost before a task that needs them.

    A run gives up a task that `WORKERS_MAX` workers died of. Unless all do (`deaths` 1), the last one of them lives.
    """

    def __init__(self, seed: int, *, workers: int = 2, deaths: float = 0.0, losses: float = 0.0) -> None:
        self.workers = workers
        self.deaths = deaths
        self.losses = losses
        self.submitted = 0
        self._random = Random(seed)
        self._died: Counter[bytes] = Counter()
        self.spares = 1
        self.replaced = 0
        self.kept: set[HereReference] = set()
        self.kept_most = 0
        self.lost = 0

    async def submit(self, function: Callable, *arguments: object) -> object:
        self.submitted += 1
        references = [one for one in arguments if isinstance(one, HereReference)]
        task = pickle.dumps((function, [self._opened(one) for one in arguments]))
        for _ in range(self._random.randrange(6)):
            await trio.lowlevel.checkpoint()
        for one in references:
            if one.body is not None and self._random.random() < self.losses:
                one.body = None
                self.lost += 1
        if lost := [one for one in references if one.body is None or one.released]:
            for one in lost:
                one.told += 1
                assert one.told < _TOLD_MAX, "who gives it to a task was told that it is lost"
            return Lost(tuple(lost[: self._random.randint(1, len(lost))]))
        tried = pickle.dumps((function, [self._opened(one) for one in arguments if not isinstance(one, Ticket)]))
        lives = self.deaths < 1 and self._died[tried] == WORKERS_MAX - 1
        if not lives and self._random.random() < self.deaths:
            self._died[tried] += 1
            return WorkerDied("killed")
        function, arguments = pickle.loads(task)
        return pickle.loads(pickle.dumps(function(*arguments)))

    @staticmethod
    def _opened(argument: object) -> object:
        if not isinstance(argument, HereReference):
            return argument
        return None if argument.body is None else pickle.loads(argument.body)

    async def keep(self, function: Callable, *arguments: object) -> object:
        result = await self.submit(function, *arguments)
        if not isinstance(result, tuple):
            return result
        head, body = result
        reference = HereReference(body)
        self.kept.add(reference)
        self.kept_most = max(self.kept_most, len(self.kept))
        return Kept(head, reference)

    def release(self, reference: HereReference) -> None:
        assert not reference.released
        reference.released = True
        self.kept.remove(reference)

    async def up(self) -> None:
        await trio.lowlevel.checkpoint()

    async def end_stalled(self) -> None:
        await trio.lowlevel.checkpoint()

    def warm_spare(self) -> None:
        self.replaced += 1


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="planned-run-")


class NotedProducer:
    """A producer that only notes its tickets; the store is a directory."""

    def __init__(self, root: Path | None = None, *, most: int = 10**6) -> None:
        self.root = root or Path(_scratch().name)
        self.most = most  # reservations until it lets them wait for ever
        self.reserved: list[tuple[dict, list[int]]] = []
        self.tickets: dict[int, list[Ticket]] = {}
        self.settled: dict[int, Descriptor] = {}
        self.flushed = 0

    async def reserve(self, *, position: dict, records: Sequence[int], payload_bytes: int) -> Ticket:
        await trio.lowlevel.checkpoint()
        if len(self.reserved) == self.most:
            await trio.sleep_forever()
        assert payload_bytes > 0
        self.reserved.append((position, list(records)))
        return self._issue(len(self.reserved) - 1)

    def renew(self, ticket: Ticket) -> Ticket:
        return self._issue(ticket.seq)

    def _issue(self, seq: int) -> Ticket:
        found = Ticket(seq, data_key(LAKE_ID, "plan", Epoch(1), seq))
        self.tickets.setdefault(seq, []).append(found)
        return found

    def settle(self, ticket: Ticket, descriptor: Descriptor) -> None:
        assert ticket.seq == descriptor.seq
        assert ticket.seq not in self.settled
        assert descriptor.key in {one.key for one in self.tickets[ticket.seq]}
        self.settled[ticket.seq] = descriptor

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        self.flushed = len(self.steps)

    def sink(self, slices: int = 2, ext: str = ".npy") -> StepSink:
        identity = LakeIdentity(LAKE_ID, Grid(slices), ext, 0, check_payload=True)
        to = Destination(f"file://{self.root}", StoreOptions(), identity, "plan", Epoch(1))
        return StepSink(self, put_step, to)

    @property
    def steps(self) -> list[tuple[list[bytes], dict, list[int]]]:
        """Those that would be committed: payloads, position, records."""
        found = []
        for seq, (position, records) in enumerate(self.reserved):
            if seq not in self.settled:
                break
            tgb = self.settled[seq]
            body = (self.root / tgb.key).read_bytes()
            places = [tgb.slice(SliceIndex(index)) for index in range(tgb.slices)]
            assert [place.records for place in places] == records
            found.append(([body[one.offset : one.offset + one.length] for one in places], position, records))
        return found


def write_corpus(directory: Path, name: str, records: int, *, bad: Sequence[int] = ()) -> None:
    """JSONL in two files; record i of a source says so, and is of a length of its own."""
    directory.joinpath(name).mkdir()
    lines = [
        "{broken" if number in bad else json.dumps({"text": f"{name} {number} " + "x" * (number * 37 % 90)})
        for number in range(records)
    ]
    half = len(lines) // 2
    directory.joinpath(name, "a.jsonl").write_text("".join(line + "\n" for line in lines[:half]))
    directory.joinpath(name, "b.jsonl").write_text("".join(line + "\n" for line in lines[half:]))


def sources_in(directory: Path, weights: Mapping[str, int], *, epochs: int | None = None) -> tuple[LoadedSource, ...]:
    found = []
    for name in sorted(weights):
        ends = None if epochs is None else Fraction(epochs)
        spec = source_spec(directory / name, name=name, seed=5, block_bytes=2000, epochs=ends)
        found.append(LoadedSource(spec, transform_spec(), Layout(spec, list_corpus(spec))))
    return tuple(found)


def rules(weights: Mapping[str, int], *, ranks: int = 2, length: int = 64, **more) -> Rules:
    names = sorted(weights)
    mix = MixSchedule([MixEntry(0, normalise({name: Fraction(weights[name]) for name in names}, names))])
    more.setdefault("sources", {name: SourceRule("i", "l") for name in names})
    return Rules("digest", mix=mix, stages=Stages({0: length}), ranks=ranks, **more)


async def run(
    engine: HereEngine,
    producer: NotedProducer,
    chosen: Rules,
    sources: tuple[LoadedSource, ...],
    *,
    position: object = None,
    watching: RunCallbacks | None = None,
    ext: str = ".npy",
    columns: tuple[ColumnSpec, ...] = (),
    sink: StepSink | None = None,
    **more,
) -> tuple[Pipeline, EndReason]:
    state: State = Planner(chosen).begin(None if position is None else read_position(position))
    running = RunConfig(chosen, sources, PayloadSpec(ext, True, 257, 258, columns=columns), **more)
    sink = sink or producer.sink(chosen.ranks, ext)
    pipeline = Pipeline(running, engine, sink, watching or RunCallbacks())
    return pipeline, await pipeline.run(state)
