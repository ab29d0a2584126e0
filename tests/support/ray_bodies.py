"""A Ray engine and its bodies, as tests look at them: run where ray is installed, findings as a line of JSON.

`python -c "import ray_bodies; ray_bodies.main(WHAT, …)"`: workers find these functions by the module's name.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import ray
import trio

from stepfs_producer.engine import ray_calls
from stepfs_producer.engine.api import Kept, Lost, WorkerDied
from stepfs_producer.engine.ray import RayEngine, RayReference, ray_engine

NUMBERS = 1 << 20
WAIT_S = 60.0
SOON_S = 10.0
SENT_ALONG_MAX = 100 << 10  # by Ray, with the answer


class Counted:
    """Bytes of pickles that the command made and read, and of bodies that Ray sent along with an answer."""

    def __init__(self) -> None:
        self.nbytes = 0
        vars(ray_calls)["pickle"] = SimpleNamespace(dumps=self._dumps, loads=self._loads)
        keep = RayEngine.keep

        async def counted(engine: RayEngine, *arguments: Any) -> Any:
            kept = await keep(engine, *arguments)
            if isinstance(kept, Kept) and not await in_store(kept):
                self.nbytes += 2 * kept.reference.nbytes  # there and back
            return kept

        setattr(RayEngine, "keep", counted)  # noqa: B010 - mypy minds that it is a method

    def _dumps(self, what: object) -> bytes:
        data = pickle.dumps(what)
        self.nbytes += len(data)
        return data

    def _loads(self, data: bytes) -> object:
        self.nbytes += len(data)
        return pickle.loads(data)


async def in_store(kept: Kept[Any]) -> bool:
    """Ray notes where an object is soon after the answer that it comes with."""
    stored = cast("RayReference", kept.reference).stored
    with trio.move_on_after(SOON_S if kept.reference.nbytes > SENT_ALONG_MAX else 0.1):
        while not ray.experimental.get_object_locations([stored])[stored]["node_ids"]:  # noqa: ASYNC110
            await trio.sleep(0.01)
        return True
    return False


def made(count: int) -> tuple[str, dict[str, object]]:
    return ray.get_runtime_context().get_node_id(), {"numbers": np.ones(count, np.int64), "text": "x" * 5}


def total(*bodies: dict[str, Any]) -> int:
    return sum(int(body["numbers"].sum()) for body in bodies)


def overwrite(body: dict[str, Any]) -> None:
    body["numbers"][0] = 2


def sleep_but_on(node_id: str) -> None:
    time.sleep(0.2 if ray.get_runtime_context().get_node_id() == node_id else 600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def keep(engine: RayEngine, count: int) -> Kept[str]:
    found = await engine.keep(made, count)
    assert isinstance(found, Kept)
    return found


async def left_of(names: list[bytes]) -> int:
    """How many of these objects are in the store, once none is, or after a while."""
    found = ray._private.worker.global_worker.core_worker
    left = names
    with trio.move_on_after(WAIT_S):
        while left := [  # noqa: ASYNC110 - Ray tells nobody
            one for one in left if found.object_exists(ray.ObjectRef(one, skip_adding_local_ref=True))
        ]:
            await trio.sleep(0.1)
    return len(left)


async def life() -> dict[str, object]:
    counted = Counted()
    async with ray_engine("auto", 2, say=print) as engine:
        await engine.admit(list)
        kept = [await keep(engine, NUMBERS) for _ in range(4)]
        references = [one.reference for one in kept]
        found: dict[str, object] = {
            "in store": [await in_store(one) for one in kept],
            "bytes": engine.kept_bytes,
            "total": await engine.submit(total, *references),
        }
        found["through the command"] = counted.nbytes
        try:
            await engine.submit(overwrite, references[0])
        except ValueError as error:
            found["overwritten"] = str(error)
        deaths = [await engine.submit(die) for _ in range(engine.workers + engine.spares)]
        found["died"] = [isinstance(one, WorkerDied) for one in deaths]
        found["without their machine"] = [not one.with_machine for one in deaths if isinstance(one, WorkerDied)]
        found["total after them"] = await engine.submit(total, *references)
        with trio.move_on_after(0.5):
            await engine.submit(time.sleep, 600)
        small = await keep(engine, 10)
        found["small"] = [await in_store(small), await engine.submit(total, small.reference, references[0])]
        names = [cast("RayReference", one).stored.binary() for one in references]  # type: ignore[union-attr]
        for one in [*references, references[0], small.reference]:
            engine.release(one)
        found["released"] = await engine.submit(total, references[0]) == Lost((references[0],))
        found["left"] = [engine.kept_bytes, await left_of(names)]
    return found


async def node_lost(address: str) -> dict[str, object]:
    """Bodies on both nodes; the one that this process is not on is lost once a line has been written."""
    async with ray_engine(address, 2, say=print) as engine:
        await engine.admit(list)
        here = ray.get_runtime_context().get_node_id()
        kept: list[Kept[str]] = []
        while len({one.head for one in kept}) < 2:
            kept += [await keep(engine, NUMBERS) for _ in range(2)]
        references = [one.reference for one in kept]
        deaths: list[object] = []

        async def sleep() -> None:
            deaths.append(await engine.submit(sleep_but_on, here))

        async with trio.open_nursery() as nursery:
            for _ in range(engine.workers + engine.spares):
                nursery.start_soon(sleep)
            await trio.sleep(1)
            os.write(1, b"kept\n")
            await trio.to_thread.run_sync(sys.stdin.readline)
        began_s = time.monotonic()
        answer: object = None
        while not isinstance(answer, Lost):
            answer = await engine.submit(total, *references)
        took_s = time.monotonic() - began_s
        there = {id(one.reference) for one in kept if one.head != here}
        stay = [one.reference for one in kept if one.head == here]
        lost = {id(one) for one in answer.references}
        return {
            "seconds": took_s,
            "with their machine": [one.with_machine for one in deaths if isinstance(one, WorkerDied)],
            "exactly those there": lost == there,
            "others": await engine.submit(total, *stay) == NUMBERS * len(stay),
        }


def run(*arguments: str) -> dict[str, object]:
    from stepfs_producer.cli import main as command  # noqa: PLC0415

    counted = Counted()
    sys.argv = ["stepfs-produce", "run", *arguments]
    try:
        command()
    except SystemExit as ended:
        return {"code": ended.code, "through the command": counted.nbytes}
    return {"code": 0, "through the command": counted.nbytes}


def main(what: str, *arguments: str) -> None:
    if what == "run":
        found = run(*arguments)
    else:
        found = trio.run(life) if what == "life" else trio.run(node_lost, arguments[0])
    os.write(1, f"{json.dumps(found)}\n".encode())
