"""A create on file:// is an answer only once its name is durable."""

from __future__ import annotations

import os

import pytest
import trio

from stepfs.lake import slots
from stepfs.store.api import Put
from stepfs.store.local import local_store
from stepfs.store.local.local_store import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "lake")


@pytest.mark.parametrize("where", ["log", "."])
async def test_a_name_that_a_crash_may_take_back_is_no_commit(store, monkeypatch, where):
    """The directory's fsync fails: the object is there to be read, and must not settle the question yet."""
    await store.put("lake", [b"x"])
    real, failing = local_store.sync_directory, [True]  # type: ignore[attr-defined]

    def sync(directory):
        if failing and directory == store.root / where:
            raise OSError(5, "Input/output error")
        real(directory)

    monkeypatch.setattr(local_store, "sync_directory", sync)
    monkeypatch.setattr(slots, "_RETRY_S", (0.0, 0.0))
    unsettled = await slots.take_slot(store, "log/1", b"mine")
    assert isinstance(unsettled, slots.Unknown)
    assert "input/output error" in unsettled.why
    assert isinstance(await slots.take_slot(store, "log/1", b"mine"), slots.Unknown)
    failing.clear()
    synced = []
    monkeypatch.setattr(local_store, "sync_directory", lambda directory: (synced.append(directory), real(directory)))
    assert await slots.take_slot(store, "log/1", b"mine") == slots.Mine()
    assert store.root / where in synced


async def test_a_link_that_may_have_happened_is_synced_before_it_counts(store, monkeypatch):
    await store.create("log/0", b"x")
    link, synced, real = os.link, [], local_store.sync_directory  # type: ignore[attr-defined]

    def broken(*arguments, **options):
        link(*arguments, **options)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stepfs.store.local.local_store.os.link", broken)
    monkeypatch.setattr(local_store, "sync_directory", lambda directory: (synced.append(directory), real(directory)))
    assert await slots.take_slot(store, "log/1", b"mine") == slots.Mine()
    assert synced == [store.root / "log"]


async def test_delete_prunes_directories_that_a_racing_create_makes_again(store):
    rounds = 200
    deleted = set()

    async def create():
        for number in range(rounds):
            answer = await store.create(f"a/b/c/{number}", b"x")
            # One that is deleted before its name was made durable, directory and all, is not known to have been.
            assert answer is Put.CREATED or (answer is Put.UNKNOWN and number in deleted)

    async def delete():
        for number in range(rounds):
            deleted.add(number)
            await store.delete([f"a/b/c/{number}", f"a/b/x/{number}"])
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(create)
        nursery.start_soon(delete)
    await store.delete([entry.key for entry in await store.list("")])
    assert [path.name for path in store.root.iterdir()] == [".stepfs-tmp"]
