"""Workers on the machines of a Ray cluster, or of a Ray that this command starts and ends.

A worker is an actor that Ray neither restarts nor gives a task twice, because `failover` does both.

A body is the second of two objects that a task returns, not one that the worker puts: so the command owns it, and it
outlives its worker. It stays in the memory of the worker's node, and is lost with the node; Ray fetches it to the node of a
task that needs it. Ray itself sends a small one (100 KiB) along with the answer.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any, Final, TypeVar, cast

import trio

from stepfs.errors import StoreUnreachableError
from stepfs_producer.engine import ray_calls
from stepfs_producer.engine.api import Kept, Look, Lost, UnfitNodesError, WorkerDied, spares_of
from stepfs_producer.engine.bodies import Given, LostBodies
from stepfs_producer.engine.ray_calls import Actor, InStore, RayError
from stepfs_producer.engine.reach import in_a_thread, line_of, options_of_init, refuse_unreachable
from stepfs_producer.engine.worker import begin_in_ray

T = TypeVar("T")
H = TypeVar("H")

LOOK_S: Final = 120.0  # that a node has to start a process and look around
WAITED_S: Final = 15.0  # for workers, before it is told
_AGAIN_S: Final = 1.0  # before a worker is started in place of one that did not come up


class RayReference:
    """A body in Ray's object store, until it is released."""

    def __init__(self, stored: InStore, nbytes: int) -> None:
        self.stored: InStore | None = stored
        self.nbytes = nbytes


class RayEngine:
    """Tasks in actors, spread over the nodes, one CPU each."""

    def __init__(
        self, workers: int, nursery: trio.Nursery, preload: Callable[[], object], say: Callable[[str], None]
    ) -> None:
        self._workers = workers
        self._nursery = nursery
        self._preload = preload
        self._say = say
        self._look: Look | None = None
        self._admitted = trio.Event()
        self._first = trio.Event()  # worker is up
        self._seen: set[str] = set()  # nodes
        self._actors: set[Actor] = set()
        self._node_of: dict[Actor, str] = {}  # of those that are up
        self._starting: set[Actor] = set()  # those of them that are not up yet
        self._up, self._idle = trio.open_memory_channel[Actor](math.inf)
        self._why = ""
        self.died = 0  # workers, so far
        self.kept_bytes = 0  # of bodies, now

    @property
    def workers(self) -> int:
        return self._workers

    @workers.setter
    def workers(self, count: int) -> None:
        self._workers = count
        self._fit()

    @property
    def spares(self) -> int:
        return spares_of(self._workers)

    async def admit(self, look: Look) -> None:
        """Start workers, unless `look` finds something missing on a node: `UnfitNodesError` has a line for each.

        `StoreUnreachableError`: a store is away from a node, now.
        """
        self._look = look
        self._fit()  # they come up meanwhile
        found: dict[str, list[str]] = {}
        try:
            async with trio.open_nursery() as nursery:
                for node_id in ray_calls.nodes():
                    nursery.start_soon(self._look_at, node_id, found)
        except* StoreUnreachableError as away:
            raise away.exceptions[0] from None
        if lines := [line for node_id in sorted(found) for line in found[node_id]]:
            raise UnfitNodesError("\n".join(lines))
        self._admitted.set()
        self._nursery.start_soon(self._tell_waiting)

    async def up(self) -> None:
        """Return once a worker has come up."""
        await self._first.wait()

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker; cancelling it kills the worker."""
        result = await self._carry_out(function, arguments, keep=False)
        return result if isinstance(result, WorkerDied | Lost) else cast("T", result[0])

    async def keep(
        self, function: Callable[..., tuple[H, object]], *arguments: object
    ) -> Kept[H] | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker, and keep the second part of what it returns."""
        result = await self._carry_out(function, arguments, keep=True)
        if isinstance(result, WorkerDied | Lost):
            return result
        (head, nbytes), stored = result
        self.kept_bytes += nbytes
        return Kept(head, RayReference(stored, nbytes))

    def release(self, reference: object) -> None:
        """Let the body go."""
        assert isinstance(reference, RayReference)
        if reference.stored is not None:
            reference.stored = None
            self.kept_bytes -= reference.nbytes

    async def _carry_out(
        self, function: Callable[..., Any], arguments: tuple[object, ...], *, keep: bool
    ) -> tuple[Any, InStore] | WorkerDied | Lost:
        bodies = [one for one in arguments if isinstance(one, RayReference)]
        if lost := tuple(body for body in bodies if body.stored is None):
            return Lost(lost)
        numbers = itertools.count()
        given = tuple(Given(next(numbers)) if isinstance(one, RayReference) else one for one in arguments)
        stored = [body.stored for body in bodies]
        actor = await self._idle.receive()
        try:
            (done, value), kept = await ray_calls.run_in(actor, function, given, stored, keep=keep)
        except RayError as error:  # also if it died before: `_ask_idle` leaves few of these
            self.died += 1
            with_node = ray_calls.lost_with_node(error, self._node_of[actor])
            self._end(actor)
            self._ask_idle()
            self._fit()
            return WorkerDied(line_of(error), with_machine=with_node)
        except BaseException:
            self._end(actor)
            raise
        self._up.send_nowait(actor)
        if not done:
            raise value
        if isinstance(value, LostBodies):
            return Lost(tuple(bodies[index] for index in value.indices))
        return value, kept

    def warm_spare(self) -> None:
        """Start a worker in place of one that was ended."""
        self._fit()

    def _fit(self) -> None:
        """Start the workers that are missing, and end idle ones that are too many."""
        missing = self._workers + self.spares - len(self._actors)
        for _ in range(missing):
            actor = ray_calls.start()
            self._actors.add(actor)
            self._starting.add(actor)
            self._nursery.start_soon(self._start, actor)
        for _ in range(-missing):
            with suppress(trio.WouldBlock):
                self._end(self._idle.receive_nowait())

    def end(self) -> None:
        """Of all workers, also in a cluster that stays."""
        for actor in list(self._actors):
            self._end(actor)

    def _end(self, actor: Actor) -> None:
        self._actors.discard(actor)
        self._starting.discard(actor)
        self._node_of.pop(actor, None)
        ray_calls.end(actor)

    async def _start(self, actor: Actor) -> None:
        try:
            self._node_of[actor] = node_id = await ray_calls.where(actor)
            await self._admitted.wait()
            if node_id not in self._seen:  # it joined later
                found: dict[str, list[str]] = {}
                await self._look_at(node_id, found)
                if found:
                    raise UnfitNodesError("\n".join(found[node_id]))
            (done, value), _ = await ray_calls.run_in(actor, begin_in_ray, (self._preload,))
        except (RayError, StoreUnreachableError) as error:
            self._why = f"the last one died at its start: {line_of(error)}"
            self._end(actor)
            await trio.sleep(_AGAIN_S)
            self._fit()
            return
        if not done:
            raise value
        self._why = ""
        self._starting.discard(actor)
        self._up.send_nowait(actor)
        self._first.set()

    def _ask_idle(self) -> None:
        """Have idle workers answer before they get tasks: where one died, a node may be lost, with all that it had."""

        async def ask(actor: Actor) -> None:
            try:
                await ray_calls.where(actor)
            except RayError:
                self._end(actor)
                self._fit()
            else:
                self._up.send_nowait(actor)

        with suppress(trio.WouldBlock):
            while True:
                self._nursery.start_soon(ask, self._idle.receive_nowait())

    async def _look_at(self, node_id: str, found: dict[str, list[str]]) -> None:
        """Note what a node lacks, unless it lacks nothing. `StoreUnreachableError`, as `admit`."""
        assert self._look is not None
        name = f"node {ray_calls.nodes().get(node_id, '')} ({node_id[:8]})"
        lines = [f"did not answer within {LOOK_S:.0f} s; look at it, or take it out of the cluster"]
        with trio.move_on_after(LOOK_S):
            try:
                done, value = await ray_calls.run_at(node_id, self._look)
                if not done and isinstance(value, StoreUnreachableError):
                    raise StoreUnreachableError(f"{name}: {value}")
                lines = list(value) if done else [f"cannot look around: {line_of(value)}"]
            except RayError as error:
                lines = [f"cannot run stepfs ({line_of(error)}); install the stepfs of the command there"]
        self._seen.add(node_id)
        if lines:
            found[node_id] = [f"{name} {line}" for line in lines]

    async def _tell_waiting(self) -> None:
        """A cluster may have fewer CPUs than workers, for now; those that are up work."""
        told = 0
        while True:
            await trio.sleep(WAITED_S)
            up = len(self._actors - self._starting)
            missing = max(self._workers - up, 0)
            if missing and missing != told:
                cpus, free = ray_calls.cpus()
                why = f"each takes a CPU, and the cluster has {cpus}, {free} of them free; add nodes, or use fewer"
                self._say(
                    f"waiting for {missing} of {self._workers} workers: {(free >= 1 and self._why) or why}"
                )
            told = missing


@asynccontextmanager
async def ray_engine(
    address: str | None,
    workers: int | None,
    *,
    most: int | None = None,
    preload: Callable[[], object] = os.getpid,
    travelling: AbstractContextManager[str | None],
    store_bytes: int = 0,
    say: Callable[[str], None],
) -> AsyncIterator[RayEngine]:
    """An engine on the cluster at `address`, or on a Ray of its own, which ends with it. It has no workers before `admit`.

    `workers`: at first, and `most` later; None: those that the CPUs are enough for. `travelling`: a directory that is sent
    to the nodes, where workers are in it. `store_bytes`: memory for what is under way, in a Ray of its own.
    """
    options = options_of_init(
        most or workers or len(os.sched_getaffinity(0)), store_bytes, own=address is None
    )
    if address is not None:
        await refuse_unreachable(address)
    async with in_a_thread(ray_calls.connected(address, options, travelling)), trio.open_nursery() as nursery:
        cpus, _ = ray_calls.cpus()
        engine = RayEngine(workers or max(cpus - spares_of(cpus), 1), nursery, preload, say)
        try:
            yield engine
        finally:
            nursery.cancel_scope.cancel()
            engine.end()
