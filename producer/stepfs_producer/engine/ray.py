"""Workers on the machines of a Ray cluster, or of a Ray that this command starts and ends: the only file that imports ray.

A worker is an actor that Ray neither restarts nor gives a task twice, because `failover` does both. Tasks and results
cross as pickles, as to local workers: arrays that are views into Ray's memory would keep it occupied.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, Final, TypeVar

import trio

from stepfs.errors import MissingPackageError
from stepfs_producer.engine.api import Kept, Look, Lost, UnfitNodesError, WorkerDied, spares_of
from stepfs_producer.engine.bodies import Stored, run_task
from stepfs_producer.engine.reach import (
    in_a_thread,
    line_of,
    of_our_own,
    outcome_of,
    quiet,
    refusal_of,
    refuse_unreachable,
)
from stepfs_producer.engine.worker import begin_in_ray, carried_out

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when it is imported
try:
    import ray
    from ray._private import worker as ray_worker
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as missing:
    raise MissingPackageError(
        "--engine ray needs the package ray, which is not installed: pip install 'stepfs[ray]'"
    ) from missing

T = TypeVar("T")
H = TypeVar("H")
Result = tuple[bool, Any]

LOOK_S: Final = 120.0  # that a node has to start a process and look around
WAITED_S: Final = 15.0  # for workers, before it is told
_AGAIN_S: Final = 1.0  # before a worker is started in place of one that did not come up
_STORE_BYTES_MIN: Final = 80 << 20  # Ray takes no less


class _Returned:
    """A body that came back to the command, and goes out again with each task that needs it."""

    def __init__(self, stored: Stored) -> None:
        self.stored: Stored | None = stored
        self.nbytes = len(stored.inline or b"")


class _Worker:
    """The actor. Tasks run in its main thread, one at a time."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: bytes) -> bytes:
        return carried_out(task)


_ACTOR: Final = ray.remote(_Worker).options(
    num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
)


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
        self._actors: set[Any] = set()
        self._starting: set[Any] = set()  # those of them that are not up yet
        self._up, self._idle = trio.open_memory_channel[Any](math.inf)
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
        """Start workers, unless `look` finds something missing on a node: `UnfitNodesError` has a line for each."""
        self._look = look
        self._fit()  # they come up meanwhile
        found: dict[str, list[str]] = {}
        async with trio.open_nursery() as nursery:
            for node in ray.nodes():
                if node["Alive"] and node["Resources"].get("CPU"):
                    nursery.start_soon(self._look_at, node["NodeID"], found)
        if lines := [line for node_id in sorted(found) for line in found[node_id]]:
            raise UnfitNodesError("\n".join(lines))
        self._admitted.set()
        self._nursery.start_soon(self._tell_waiting)

    async def up(self) -> None:
        """Return once a worker has come up."""
        await self._first.wait()

    async def submit(self, function: Callable[..., T], *arguments: object) -> T | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker; cancelling it kills the worker."""
        result: T | WorkerDied | Lost = await self._carry_out(function, arguments, keep=False)
        return result

    async def keep(
        self, function: Callable[..., tuple[H, object]], *arguments: object
    ) -> Kept[H] | WorkerDied | Lost:
        """Run `function(*arguments)` in a worker, and keep the second part of what it returns."""
        result = await self._carry_out(function, arguments, keep=True)
        if isinstance(result, WorkerDied | Lost):
            return result
        head, stored = result
        reference = _Returned(stored)
        self.kept_bytes += reference.nbytes
        return Kept(head, reference)

    def release(self, reference: object) -> None:
        """Let the body go."""
        assert isinstance(reference, _Returned)
        if reference.stored is not None:
            reference.stored = None
            self.kept_bytes -= reference.nbytes

    async def _carry_out(
        self, function: Callable[..., Any], arguments: tuple[object, ...], *, keep: bool
    ) -> Any:
        given = [one.stored if isinstance(one, _Returned) else one for one in arguments]
        lost = (one for one in arguments if isinstance(one, _Returned) and one.stored is None)
        if gone := tuple(lost):
            return Lost(gone)
        actor = await self._idle.receive()
        try:
            done, value = await self._run(actor, partial(run_task, keep=keep), function, tuple(given), None)
        except RayError as error:  # also if it died before: `_ask_idle` leaves few of these
            self.died += 1
            self._end(actor)
            self._ask_idle()
            self._fit()
            return WorkerDied(line_of(error))
        except BaseException:
            self._end(actor)
            raise
        self._up.send_nowait(actor)
        if not done:
            raise value
        return value

    def warm_spare(self) -> None:
        """Start a worker in place of one that was ended."""
        self._fit()

    def _fit(self) -> None:
        """Start the workers that are missing, and end idle ones that are too many."""
        missing = self._workers + self.spares - len(self._actors)
        for _ in range(missing):
            actor = _ACTOR.remote()
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

    def _end(self, actor: Any) -> None:
        self._actors.discard(actor)
        self._starting.discard(actor)
        with suppress(RayError):
            ray.kill(actor)

    async def _start(self, actor: Any) -> None:
        try:
            node_id = await _result(actor.node.remote())
            await self._admitted.wait()
            if node_id not in self._seen:  # it joined later
                found: dict[str, list[str]] = {}
                await self._look_at(node_id, found)
                if found:
                    raise UnfitNodesError("\n".join(found[node_id]))
            done, value = await self._run(actor, begin_in_ray, self._preload)
        except RayError as error:
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

        async def ask(actor: Any) -> None:
            try:
                await _result(actor.node.remote())
            except RayError:
                self._end(actor)
                self._fit()
            else:
                self._up.send_nowait(actor)

        with suppress(trio.WouldBlock):
            while True:
                self._nursery.start_soon(ask, self._idle.receive_nowait())

    async def _run(self, actor: Any, function: Callable[..., object], *arguments: object) -> Result:
        answer: Result = pickle.loads(await _result(actor.run.remote(pickle.dumps((function, arguments)))))  # noqa: S301
        return answer

    async def _look_at(self, node_id: str, found: dict[str, list[str]]) -> None:
        """Note what a node lacks, unless it lacks nothing."""
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(carried_out).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        lines = [f"did not answer within {LOOK_S:.0f} s; look at it, or take it out of the cluster"]
        with trio.move_on_after(LOOK_S):
            try:
                done, value = pickle.loads(await _result(task.remote(pickle.dumps((self._look, ())))))  # noqa: S301
                lines = list(value) if done else [f"cannot look around: {line_of(value)}"]
            except RayError as error:
                lines = [f"cannot run stepfs ({line_of(error)}); install the stepfs of the command there"]
        self._seen.add(node_id)
        if lines:
            address = next((one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node_id), "")
            found[node_id] = [f"node {address} ({node_id[:8]}) {line}" for line in lines]

    async def _tell_waiting(self) -> None:
        """A cluster may have fewer CPUs than workers, for now; those that are up work."""
        told = 0
        while True:
            await trio.sleep(WAITED_S)
            up = len(self._actors - self._starting)
            missing = max(self._workers - up, 0)
            if missing and missing != told:
                cpus, free = (of().get("CPU", 0) for of in (ray.cluster_resources, ray.available_resources))
                why = f"each takes a CPU, and the cluster has {cpus:.0f}, {free:.0f} of them free; add nodes, or use fewer"
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
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "configure_logging": False,
    }
    if address is None:
        cpus = most or workers or len(os.sched_getaffinity(0))
        options |= {
            "num_cpus": cpus + spares_of(cpus),
            "object_store_memory": max(store_bytes, _STORE_BYTES_MIN),
            "include_dashboard": False,
        }
    else:
        await refuse_unreachable(address)
    async with in_a_thread(_connected(address, options, travelling)), trio.open_nursery() as nursery:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        engine = RayEngine(workers or max(cpus - spares_of(cpus), 1), nursery, preload, say)
        try:
            yield engine
        finally:
            nursery.cancel_scope.cancel()
            engine.end()


@contextmanager
def _connected(
    address: str | None, options: dict[str, Any], travelling: AbstractContextManager[str | None]
) -> Iterator[None]:
    with of_our_own() if address is None else nullcontext() as own:
        try:
            with travelling as directory, quiet():
                environment = {} if directory is None else {"working_dir": directory}
                ray.init(address or "local", _temp_dir=own, runtime_env=environment, **options)
        except Exception as error:
            ray.shutdown()
            raise refusal_of(error, address) from error
        ray_worker._worker_logs_enabled = False  # noqa: SLF001 - its news of nodes would stand in our stdout
        try:
            yield
        finally:
            ray.shutdown()


async def _result(reference: Any) -> Any:
    return await outcome_of(reference.future())
