"""Nodes that join a Ray cluster or leave it, without Ray: what the engine makes of its answers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import trio

from stepfs_producer.engine.api import UnfitNodesError
from stepfs_producer.engine.reach import ClusterUnreachableError


class RayError(Exception):
    """Of Ray: a node or a worker is gone."""


class RayTaskError(RayError):
    """Of a task on a node."""


class Cluster:
    """Nodes and what looking at them finds; actors go to the first node with room, unless one is named."""

    def __init__(self) -> None:
        self.cpus: dict[str, int] = {}
        self.lacks: dict[str, list[str]] = {}
        self.silent: dict[str, Exception] = {}
        self.begun: list[str] = []
        self._placed: dict[Any, str] = {}

    def start(self, node_id: str | None = None) -> object:
        actor = object()
        free = [node for node in self.cpus if list(self._placed.values()).count(node) < self.cpus[node]]
        self._placed[actor] = node_id or (free or list(self.cpus))[-1]
        return actor

    def end(self, actor: object) -> None:
        self._placed.pop(actor, None)

    async def where(self, actor: object) -> str:
        await trio.lowlevel.checkpoint()
        return self._placed[actor]

    async def run_in(self, actor: object, *_: object, **__: object) -> tuple[tuple[bool, object], None]:
        await trio.lowlevel.checkpoint()
        self.begun.append(self._placed[actor])
        return (True, None), None

    async def run_at(self, node_id: str, _: object) -> tuple[bool, object]:
        await trio.lowlevel.checkpoint()
        if node_id in self.silent:
            raise self.silent[node_id]
        return True, self.lacks.get(node_id, [])

    @property
    def workers(self) -> set[str]:
        """The nodes that have some."""
        return set(self._placed.values())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found, calls = Cluster(), ModuleType("stepfs_producer.engine.ray_calls")
    names = ("start", "end", "where", "run_in", "run_at")
    parts: dict[str, object] = {name: getattr(found, name) for name in names}
    parts |= {"nodes": lambda: dict.fromkeys(found.cpus, "10.0.0.1"), "cpus": lambda: (sum(found.cpus.values()), 0)}
    parts |= {"cpus_of_nodes": lambda: dict(found.cpus), "RayError": RayError, "Actor": Any, "InStore": Any}
    parts |= {"is_answer": lambda error: isinstance(error, RayTaskError), "lost_with_node": lambda *_: True}
    for name, part in parts.items():
        setattr(calls, name, part)
    monkeypatch.setitem(sys.modules, "stepfs_producer.engine.ray_calls", calls)
    monkeypatch.setattr("stepfs_producer.engine.ray_calls", calls, raising=False)
    monkeypatch.delitem(sys.modules, "stepfs_producer.engine.ray", raising=False)
    yield found
    sys.modules.pop("stepfs_producer.engine.ray", None)  # it was imported with these calls


def engine_of(nursery: trio.Nursery, said: list[str], workers: int = 2) -> Any:
    module = importlib.import_module("stepfs_producer.engine.ray")
    return module.RayEngine(workers, nursery, lambda: None, said.append)


async def test_an_unfit_node_that_joins_gets_no_worker_and_ends_nothing(cluster, autojump_clock) -> None:
    said: list[str] = []
    cluster.cpus = {"fit": 2}
    async with trio.open_nursery() as nursery:
        engine = engine_of(nursery, said)
        await engine.admit(list)
        await engine.up()
        cluster.cpus["joined"] = 4
        cluster.lacks["joined"] = ["has numpy 1.0, the command 2.0; install the same"]
        engine.workers = 4
        engine.warm_spare()
        await trio.sleep(60)
        assert cluster.workers == {"fit"}
        assert set(cluster.begun) == {"fit"}
        (line,) = [line for line in said if "joined" in line]
        assert line.startswith("no worker runs on a node that joined: node 10.0.0.1 (joined) has numpy 1.0")
        cluster.cpus["good"] = 9
        engine.workers = 6
        engine.warm_spare()
        await trio.sleep(60)
        assert cluster.workers == {"fit", "good"}
        nursery.cancel_scope.cancel()


async def test_where_no_fit_node_is_left_the_run_is_refused(cluster, autojump_clock) -> None:
    cluster.cpus = {"fit": 2}
    with pytest.raises(BaseExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            engine = engine_of(nursery, [])
            await engine.admit(list)
            await engine.up()
            cluster.cpus = {"joined": 4}
            cluster.lacks["joined"] = ["has numpy 1.0"]
            engine.workers = 4
            engine.warm_spare()
            await trio.sleep(60)
    assert caught.group_contains(UnfitNodesError, match="has numpy 1.0")


async def test_a_lost_node_that_is_still_listed_is_no_lack(cluster, autojump_clock) -> None:
    """The cluster lists it until its health check has failed, 13 s later."""
    cluster.cpus = {"fit": 2, "lost": 2}
    cluster.silent["lost"] = RayError("the node died")

    async def health_check() -> None:
        await trio.sleep(13)
        del cluster.cpus["lost"]

    async with trio.open_nursery() as nursery:
        engine = engine_of(nursery, [])
        nursery.start_soon(health_check)
        await engine.admit(list)
        assert 13 <= trio.current_time() <= 15
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("error", "after_s"), [(RayTaskError("no module stepfs_producer"), 0), (RayError("it never starts"), 30)]
)
async def test_a_node_that_stays_and_cannot_run_stepfs_is_named(cluster, autojump_clock, error, after_s) -> None:
    cluster.cpus = {"fit": 2, "bare": 2}
    cluster.silent["bare"] = error
    async with trio.open_nursery() as nursery:
        engine = engine_of(nursery, [])
        with pytest.raises(UnfitNodesError, match=r"node 10.0.0.1 \(bare\) cannot run stepfs"):
            await engine.admit(list)
        assert after_s <= trio.current_time() <= after_s + 1
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("found", ["10.0.0.4:6379", None])
async def test_auto_is_the_cluster_of_this_machine_as_everywhere_in_ray(cluster, monkeypatch, found) -> None:
    module = importlib.import_module("stepfs_producer.engine.ray")
    asked: list[str] = []

    async def reach(address: str) -> None:
        asked.append(address)
        raise EndOfTestError

    monkeypatch.setattr(module.ray_calls, "address_here", lambda: found, raising=False)
    monkeypatch.setattr(module, "refuse_unreachable", reach)
    engine = module.ray_engine("auto", 1, say=print)
    with pytest.raises(EndOfTestError if found else ClusterUnreachableError) as caught:
        await engine.__aenter__()
    assert asked == ([found] if found else [])
    assert found or "`ray start --head` here first" in str(caught.value)


class EndOfTestError(Exception):
    """The address was reached."""
