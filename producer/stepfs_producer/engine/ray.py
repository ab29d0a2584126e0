"""Workers on the machines of a Ray cluster.

A worker is an actor that Ray neither restarts nor gives a task twice, because `tasks` does both.

A body is the second of two objects that a task returns: so the command owns it, and it outlives its worker. It is lost
with the worker's node. Ray fetches it to the node of a task that needs it, and sends a small one (100 KiB) along with the
answer.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import trio

from stepfs.errors import StoreUnreachableError
from stepfs_producer.engine import ray_calls
from stepfs_producer.engine.api import (
    ANSWER_S,
    Engine,
    Kept,
    Lost,
    NodeCheck,
    Reference,
    UnfitNodesError,
    WorkerDied,
    spares_of,
)
from stepfs_producer.engine.ray_calls import Actor, InStore, RayError
from stepfs_producer.engine.reach import ClusterUnreachableError, line_of, refuse_unreachable
from stepfs_producer.engine.shared_memory import BodyArgument, LostBodies
from stepfs_producer.engine.worker import begin_in_ray

T = TypeVar("T")
H = TypeVar("H")

LOOK_S: Final = 120.0  # that a node has to start a process and look around
GONE_S: Final = 30.0  # within which a cluster no longer lists a node that it has lost
WAITED_S: Final = 15.0  # for workers, before it is told
_AGAIN_S: Final = 1.0  # before a worker is started in place of one that did not come up


class RayReference:
    """A body in Ray's object store, until it is released."""

    def __init__(self, stored: InStore, nbytes: int) -> None:
        self.stored: InStore | None = stored
        self.nbytes = nbytes


class RayEngine(Engine):
    """Tasks in actors, spread over the nodes, one CPU each."""

    def __init__(
        self, workers: int, nursery: trio.Nursery, preload: Callable[[], object], say: Callable[[str], None]
    ) -> None:
        super().__init__(workers)
        self._nursery = nursery
        self._preload = preload
        self._say = say
        self._look: NodeCheck | None = None
        self._admitted = trio.Event()
        self._first = trio.Event()  # worker is up
        self._seen: set[str] = set()  # nodes
        self._unfit: dict[str, list[str]] = {}  # of those that joined later: what they lack
        self._actors: set[Actor] = set()
        self._node_of: dict[Actor, str] = {}  # of those that are up
        self._starting: set[Actor] = set()  # those of them that are not up yet
        self._up, self._idle = trio.open_memory_channel[Actor](math.inf)
        self._why = ""

    async def admit(self, look: NodeCheck) -> None:
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
        await self._first.wait()

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied | Lost:
        result = await self._carry_out(function, arguments, keep=False)
        return result if isinstance(result, WorkerDied | Lost) else cast("T", result[0])

    async def keep(self, function: Callable[..., tuple[H, object]], *arguments: object) -> Kept[H] | WorkerDied | Lost:
        result = await self._carry_out(function, arguments, keep=True)
        if isinstance(result, WorkerDied | Lost):
            return result
        (head, nbytes), stored = result
        self.kept_bytes += nbytes
        return Kept(head, RayReference(stored, nbytes))

    def release(self, reference: Reference) -> None:
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
        given = tuple(BodyArgument(next(numbers)) if isinstance(one, RayReference) else one for one in arguments)
        stored = [body.stored for body in bodies]
        actor = await self._idle.receive()
        try:
            (done, value), kept = await ray_calls.run_in(actor, function, given, stored, keep=keep)
        except RayError as error:  # also if it died before: `end_stalled` leaves few of these
            self.died += 1
            with_node = ray_calls.lost_with_node(error, self._node_of[actor])
            self._end(actor)
            self._nursery.start_soon(self.end_stalled)
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
        self._fit()

    def _fit(self) -> None:
        missing = self._workers + self.spares - len(self._actors)
        for _ in range(missing):
            actor = ray_calls.start(self._roomiest() if self._unfit else None)
            self._actors.add(actor)
            self._starting.add(actor)
            self._nursery.start_soon(self._start, actor)
        for _ in range(-missing):
            with suppress(trio.WouldBlock):
                self._end(self._idle.receive_nowait())

    def _roomiest(self) -> str:
        """The fit node with the most CPUs to spare: Ray itself would try an unfit one again. `UnfitNodesError`: none is fit."""
        here = Counter(self._node_of.values())
        fit = {node: cpus - here[node] for node, cpus in ray_calls.cpus_of_nodes().items() if node not in self._unfit}
        if not fit:
            raise UnfitNodesError("\n".join(line for node in sorted(self._unfit) for line in self._unfit[node]))
        return max(sorted(fit), key=lambda node: fit[node])

    def end(self) -> None:
        """End all workers, also in a cluster that stays."""
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
                if found and node_id not in self._unfit:
                    self._unfit |= found
                    self._say(f"no worker runs on a node that joined: {'; '.join(found[node_id])}")
            if node_id in self._unfit:
                self._end(actor)
                self._fit()
                return
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

    async def end_stalled(self) -> None:
        """End the workers that do not answer, and start others. Where a worker died, a node may be lost, with all that it had."""

        async def ask(actor: Actor) -> None:
            with trio.move_on_after(ANSWER_S), suppress(RayError):
                await ray_calls.where(actor)
                self._up.send_nowait(actor)
                return
            self._end(actor)
            self._fit()

        async with trio.open_nursery() as nursery:
            with suppress(trio.WouldBlock):
                while True:
                    nursery.start_soon(ask, self._idle.receive_nowait())

    async def _look_at(self, node_id: str, found: dict[str, list[str]]) -> None:
        """Note the lacks of a node, if it has any. `StoreUnreachableError`, as `admit`."""
        name = f"node {ray_calls.nodes().get(node_id, '')} ({node_id[:8]})"
        lines = [f"did not answer within {LOOK_S:.0f} s; look at it, or take it out of the cluster"]
        with trio.move_on_after(LOOK_S):
            lines = await self._lacks_of(node_id, name)
        self._seen.add(node_id)
        if lines and node_id in ray_calls.nodes():
            found[node_id] = [f"{name} {line}" for line in lines]

    async def _lacks_of(self, node_id: str, name: str) -> list[str]:
        """The lacks of a node. A lost one is still listed until its health check has failed: it is asked again till then."""
        assert self._look is not None
        give_up_s = trio.current_time() + GONE_S
        while True:
            try:
                done, value = await ray_calls.run_at(node_id, self._look)
            except RayError as error:
                if ray_calls.is_answer(error) or trio.current_time() >= give_up_s:
                    return [f"cannot run stepfs ({line_of(error)}); install the stepfs of the command there"]
                await trio.sleep(_AGAIN_S)
                if node_id not in ray_calls.nodes():
                    return []
                continue
            if not done and isinstance(value, StoreUnreachableError):
                raise StoreUnreachableError(f"{name}: {value}")
            return list(value) if done else [f"cannot look around: {line_of(value)}"]

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
                self._say(f"waiting for {missing} of {self._workers} workers: {(free >= 1 and self._why) or why}")
            told = missing


@asynccontextmanager
async def ray_engine(
    address: str,
    workers: int | None,
    *,
    preload: Callable[[], object] = os.getpid,
    environment: Mapping[str, object] = MappingProxyType({}),
    say: Callable[[str], None],
) -> AsyncIterator[RayEngine]:
    """An engine on the cluster at `address`, or `auto`: of this machine. It has no workers before `admit`.

    `workers`: at first; None: those that the CPUs are enough for. `environment`: of the workers, as Ray describes it.
    """
    if address == "auto":
        found = await trio.to_thread.run_sync(ray_calls.address_here, abandon_on_cancel=True)
        if found is None:
            raise ClusterUnreachableError(
                "no Ray runs on this machine; run `ray start --head` here first, or name HOST:PORT with --ray-address"
            )
        address = found
    await refuse_unreachable(address)
    await trio.to_thread.run_sync(ray_calls.connect, address, environment, abandon_on_cancel=True)
    if threading.current_thread() is threading.main_thread():
        # Ray's handler would abort 3 s after the signal.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        async with trio.open_nursery() as nursery:
            cpus, _ = ray_calls.cpus()
            engine = RayEngine(workers or max(cpus - spares_of(cpus), 1), nursery, preload, say)
            try:
                yield engine
            finally:
                nursery.cancel_scope.cancel()
                engine.end()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(ray_calls.disconnect)
