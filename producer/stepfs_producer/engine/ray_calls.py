"""Calls of Ray, as an engine of actors needs them: the only file that imports ray.

Tasks and results cross as pickles; bodies are views of Ray's object store while a task runs. References travel beside the
pickle of their task, because Ray counts only those it sees, and in a list, because Ray would end a task whose own
argument is lost without saying which.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from stepfs.errors import MissingPackageError
from stepfs_producer.engine.reach import outcome_of, quiet, refusal_of
from stepfs_producer.engine.shared_memory import LostBodies
from stepfs_producer.engine.worker import carried_out

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when it is imported
os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else lost bodies are errors on stderr
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of second results, whose first ones are looked at
os.environ.setdefault("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")  # a plan's modules may be ignored by git
try:
    import ray
    from ray._private import services
    from ray._private import worker as ray_worker
    from ray.exceptions import ActorUnavailableError, ObjectLostError, RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as missing:
    raise MissingPackageError(
        "--engine ray needs the package ray, which is not installed: pip install 'stepfs[ray]'"
    ) from missing

__all__ = [
    "Actor",
    "InStore",
    "RayError",
    "Result",
    "address_here",
    "connect",
    "cpus",
    "cpus_of_nodes",
    "disconnect",
    "end",
    "is_answer",
    "lost_with_node",
    "nodes",
    "run_at",
    "run_in",
    "start",
    "where",
]

Actor = Any  # a handle of ray's, whose classes it makes up
InStore = Any  # an ObjectRef of the parts of a body, which are there as long as it is
Result = tuple[bool, Any]  # whether the function returned, and what; or its exception


class _Worker:
    """The actor. Tasks run in its main thread, one at a time."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def run(self, task: bytes, bodies: list[InStore], keep: bool) -> tuple[bytes, list[pickle.PickleBuffer]]:
        try:
            found = ray.get(bodies)
        except ObjectLostError:
            lost = LostBodies(tuple(index for index, one in enumerate(bodies) if _lost(one)))
            return pickle.dumps((True, lost)), []
        answer, parts = carried_out(task, found, keep=keep)
        return answer, list(map(pickle.PickleBuffer, parts))


def _lost(body: InStore) -> bool:
    try:
        ray.get(body)
    except ObjectLostError:
        return True
    return False


_ACTOR: Final = ray.remote(_Worker).options(
    num_cpus=1, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
)


def connect(address: str, environment: Mapping[str, object]) -> None:
    """Join the cluster at `address` as a driver. `environment`: of its workers, as Ray describes it."""
    try:
        with quiet():
            ray.init(
                address,
                runtime_env=dict(environment),
                log_to_driver=False,
                logging_level=logging.CRITICAL,
                configure_logging=False,
            )
    except Exception as error:
        ray.shutdown()
        raise refusal_of(error, address) from error
    ray_worker._worker_logs_enabled = False  # noqa: SLF001 - its news of nodes would stand in our stdout


def disconnect() -> None:
    """Leave the cluster; workers that are left end with it."""
    ray.shutdown()


def address_here() -> str | None:
    """HOST:PORT of the cluster that this machine is a node of, as Ray itself finds it; None: of none."""
    with quiet(), suppress(ConnectionError):
        found = services.canonicalize_bootstrap_address_or_die("auto")
        return str(found)
    return None


def nodes() -> dict[str, str]:
    """Addresses of the nodes that are alive and have CPUs, by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in _with_cpus()}


def cpus_of_nodes() -> dict[str, int]:
    """CPUs of the same nodes, by id."""
    return {node["NodeID"]: int(node["Resources"]["CPU"]) for node in _with_cpus()}


def _with_cpus() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def is_answer(error: RayError) -> bool:
    """Whether a process on the node itself raised it; else the node may be lost."""
    return isinstance(error, RayTaskError)


def lost_with_node(error: RayError, node_id: str) -> bool:
    """Whether an actor on that node died with it: where a node is left, it says how its actor ended, within a second."""
    return isinstance(error, ActorUnavailableError) or node_id not in nodes()


def cpus() -> tuple[int, int]:
    """(all CPUs, free CPUs) of the cluster."""
    return int(ray.cluster_resources().get("CPU", 0)), int(ray.available_resources().get("CPU", 0))


def start(node_id: str | None = None) -> Actor:
    """A worker, which comes up where there is a free CPU; on that node, if one is named."""
    if node_id is None:
        return _ACTOR.remote()
    return _ACTOR.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote()


def end(actor: Actor) -> None:
    """Kill a worker; a dead one is no error."""
    with suppress(RayError):
        ray.kill(actor)


async def where(actor: Actor) -> str:
    """The id of its node, once it is up. `RayError` if it died."""
    return str(await _result(actor.node.remote()))


async def run_in(
    actor: Actor,
    function: Callable[..., object],
    arguments: tuple[object, ...],
    bodies: Sequence[InStore] = (),
    *,
    keep: bool = False,
) -> tuple[Result, InStore]:
    """Run `function(*arguments)` in a worker; see `carried_out`. `RayError` if it died."""
    task = pickle.dumps((function, arguments))
    answer, body = actor.run.options(num_returns=2).remote(task, list(bodies), keep)
    return _unpacked(await _result(answer)), body


async def run_at(node_id: str, function: Callable[[], object]) -> Result:
    """Run a function on a node, beside its workers. `RayError` if it cannot be run there."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(carried_out).options(num_cpus=0, max_retries=0, num_returns=2, scheduling_strategy=place)
    answer, _ = task.remote(pickle.dumps((function, ())))
    return _unpacked(await _result(answer))


async def _result(reference: Any) -> Any:
    return await outcome_of(reference.future())


def _unpacked(answer: bytes) -> Result:
    found: Result = pickle.loads(answer)  # noqa: S301 - of a worker of this run
    return found
