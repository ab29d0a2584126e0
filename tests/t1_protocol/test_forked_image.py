"""Hazard 8: two images of one producer process, by a fork or a restored checkpoint. One refuses, neither overwrites.

The fork itself, with a real `os.fork`, is in test_producer_sync.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from producer_world import World, append, simulate

from stepfs.errors import RefusedError
from stepfs.format.ids import Epoch
from stepfs.format.keys import component
from stepfs_producer.commit import producer as producer_room
from stepfs_producer.commit.producer import TgbWriter
from stepfs_producer.commit.rebase import Incarnation
from stepfs_producer.commit.uploads import Item


async def hazard_08_append(world: World) -> None:
    """A child process goes on with its parent's producer."""
    async with world.producer("p") as producer:
        await append(producer, 0)
        await producer.flush()
        with pytest.MonkeyPatch.context() as child:
            child.setattr(producer_room.os, "getpid", lambda: 1)  # type: ignore[attr-defined]
            with pytest.raises(RefusedError, match="after a fork"):
                await append(producer, 1)


async def hazard_08_upload(world: World) -> None:
    """Both images upload the same seq of the same epoch, with different bytes."""
    me = Incarnation("p", Epoch(1), b"i" * 16)
    for payload in (b"parent", b"child"):
        writer = TgbWriter(world.store("p"), world.identity, me, at_once=1)
        item = Item(0, (payload, payload), (1, 1), b"", 2 * len(payload))
        await writer.write(item, writer.new_key(item))
    found = sorted(body.find(b"parent") > 0 for key, body in world.shared.objects.items() if ".tgb" in key)
    assert found == [False, True]


def no_look_at_the_pid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(producer_room.os, "getpid", lambda: 1)  # type: ignore[attr-defined]


def predictable_names(patch: pytest.MonkeyPatch) -> None:
    def key(lake_id: str, producer_id: str, epoch: Epoch, seq: int) -> str:
        return f"{lake_id}/data/{component(producer_id)}/{epoch:010d}-{seq:016d}-{0:016x}.tgb"

    patch.setattr(producer_room, "data_key", key)


@pytest.mark.parametrize("scenario", [hazard_08_append, hazard_08_upload])
def test_hazard_08_a_second_image_of_a_producer(scenario: Callable[..., object]) -> None:
    simulate(scenario)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mutate", "scenario"), [(no_look_at_the_pid, hazard_08_append), (predictable_names, hazard_08_upload)]
)
def test_mutant_08_is_found(mutate, scenario, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        simulate(scenario)  # type: ignore[arg-type]
