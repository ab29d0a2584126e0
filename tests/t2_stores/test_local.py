"""What only a file system can do wrong: crashes, full disks, missing rights, names in the way, resent links."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from stepfs.errors import AbsentError, RefusedError, StoreUnreachableError, UsageError
from stepfs.lake import create_once
from stepfs.store.api import Put
from stepfs.store.local import local_store
from stepfs.store.local.local_store import LocalStore, explain, list_keys
from stepfs.store.opening import open_store

COMPONENT = st.text("ab0-._", min_size=1, max_size=3).filter(lambda name: name[0] != ".")
TREES = st.lists(st.lists(COMPONENT, min_size=1, max_size=3).map("/".join), max_size=12, unique=True)


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "lake")


@given(
    TREES,
    st.lists(COMPONENT, max_size=2).map("/".join),
    st.text("ab0-/", max_size=4),
    st.integers(0, 5) | st.none(),
)
def test_listing_equals_sorting_all_keys(names, prefix, after, limit):
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        there = []
        for name in names:
            try:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(b"x")
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a file cannot be a directory too
            there.append(name)
        expected = sorted(name for name in there if name.startswith(prefix) and name > after)[:limit]
        assert [entry.key for entry in list_keys(root, prefix, after, limit)] == expected


async def test_listing_a_large_directory_from_its_end_stats_only_the_answer(store, monkeypatch):
    (store.root / "log").mkdir(parents=True)
    for number in range(20_000):
        (store.root / f"log/{number:020}").touch()
    stats = []
    real = os.stat
    monkeypatch.setattr("stepfs.store.local.local_store.os.stat", lambda *a, **k: stats.append(a) or real(*a, **k))
    found = await store.list("log/", after=f"log/{19_990:020}", limit=5)
    assert [entry.key for entry in found] == [f"log/{number:020}" for number in range(19_991, 19_996)]
    assert len(stats) == 5


async def test_temporary_files_are_never_listed(store):
    (store.root / ".stepfs-tmp").mkdir(parents=True)
    (store.root / ".stepfs-tmp/1-dead").write_bytes(b"half an obj")
    assert await store.list("") == []
    assert await store.create("a", b"x") is Put.CREATED
    assert [entry.key for entry in await store.list("")] == ["a"]


async def test_stale_temporary_files_are_collected_by_age(store):
    place = store.root / ".stepfs-tmp"
    place.mkdir(parents=True)
    for name, age_s in (("old", 25 * 3600), ("young", 60)):
        (place / name).write_bytes(b"x")
        stamp = (place / name).stat().st_mtime - age_s
        os.utime(place / name, (stamp, stamp))
    await store.create("a", b"x")
    assert [path.name for path in place.iterdir()] == ["young"]


async def test_nothing_is_left_behind_by_any_outcome(store):
    await store.create("a", b"x")
    await store.create("a", b"y")
    await store.put("b", [b"z"])
    assert list((store.root / ".stepfs-tmp").iterdir()) == []


KILLED = """
import os, signal, sys, trio
from pathlib import Path
from stepfs.store.local import local_store
from stepfs.store.local.local_store import LocalStore
def die(*_args, **_kwargs): os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "link":
    os.link = die
elif sys.argv[2] == "replace":
    Path.replace = die
else:
    local_store.sync_directory = die
trio.run(LocalStore(Path(sys.argv[1])).create if sys.argv[2] != "replace" else
         lambda key, body: LocalStore(Path(sys.argv[1])).put(key, [body]), "log", b"x" * 100_000)
"""


@pytest.mark.parametrize(("moment", "there"), [("link", False), ("replace", False), ("fsync", True)])
async def test_a_kill_leaves_a_whole_object_or_none(store, moment, there):
    store.root.mkdir()
    (store.root / ".stepfs-tmp").mkdir()  # so that the directory fsynced is the object's
    run = await trio.run_process([sys.executable, "-c", KILLED, store.root, moment], check=False)
    assert run.returncode == -signal.SIGKILL
    assert [(entry.key, entry.size) for entry in await store.list("")] == ([("log", 100_000)] if there else [])
    assert await store.create("log", b"mine") is (Put.EXISTS if there else Put.CREATED)


async def test_a_resent_link_is_our_own_success(store, monkeypatch):
    """Hazard 2 on a network file system: the first reply is lost, the resent link finds the name taken."""
    real = os.link

    def twice(*args, **kwargs):
        real(*args, **kwargs)
        real(*args, **kwargs)

    monkeypatch.setattr("stepfs.store.local.local_store.os.link", twice)
    assert await store.create("log/1", b"mine") is Put.CREATED
    assert await store.get("log/1") == b"mine"


async def test_a_lost_race_is_not_our_success_even_with_equal_bytes(store, monkeypatch):
    real = os.link

    def beaten(source, target, **kwargs):
        Path(target).write_bytes(b"mine")
        real(source, target, **kwargs)

    monkeypatch.setattr("stepfs.store.local.local_store.os.link", beaten)
    assert await store.create("1", b"mine") is Put.EXISTS


@pytest.mark.parametrize("where", ["link", "sync_directory"])
async def test_what_a_failing_disk_may_have_done_is_unknown(store, monkeypatch, where):
    await store.create("0", b"x")

    def fail(*_args, **_kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stepfs.store.local.local_store." + ("os.link" if where == "link" else where), fail)
    assert await store.create("1", b"mine") is Put.UNKNOWN


async def test_a_root_that_vanished_is_not_an_empty_lake(store):
    await store.create("a", b"x")
    store.root.rename(store.root.with_name("elsewhere"))
    for call in (
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.create("a", b"y"),
        lambda: store.put("a", [b"y"]),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(AbsentError, match="is gone; mount or restore it"):
            await call()
    assert not store.root.exists()


async def test_a_directory_is_not_an_object(store):
    await store.put("a/b", [b"x"])
    assert await store.get("a") is None
    assert await store.get("a/b/c") is None
    with pytest.raises(RefusedError, match="move away the file"):
        await store.put("a/b/c", [b"x"])


async def test_a_symbolic_link_is_refused_and_not_listed(store):
    await store.put("real", [b"x"])
    (store.root / "link").symlink_to("/etc/passwd")
    with pytest.raises(RefusedError, match="remove the symbolic link"):
        await store.get("link")
    assert [entry.key for entry in await store.list("")] == ["real"]
    assert await store.create("link", b"x") is Put.EXISTS


async def test_a_pipe_in_the_way_does_not_block(store):
    await store.put("real", [b"x"])
    os.mkfifo(store.root / "pipe")
    assert await store.get("pipe") is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_waited_for(store, number):
    """By a producer and by `reclaim --every`, which would be gone when room is made again."""
    error = explain(OSError(number, "No space left on device"), store.root, "create log/1")
    assert isinstance(error, StoreUnreachableError)
    assert "no space left on device; free space and retry" in str(error)


async def test_a_full_disk_is_named(store, monkeypatch):
    """A file size limit fails a write in the middle, as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(RefusedError, match=r"cannot create log/1 on the file system of .*/lake: file too large"):
            await store.create("log/1", b"x" * (2 << 20))
        with pytest.raises(RefusedError, match="cannot write data/1"):
            await store.put("data/1", [b"x" * (2 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert await store.list("") == []
    assert list((store.root / ".stepfs-tmp").iterdir()) == []

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stepfs.store.local.local_store.os.writev", full)
    with pytest.raises(StoreUnreachableError, match=r"of .*/lake: no space left on device; free space and retry"):
        await store.create("log/1", b"x")


async def test_missing_rights_are_named(store, monkeypatch):
    await store.put("a", [b"x"])

    def forbid(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stepfs.store.local.local_store.os.open", forbid)  # root ignores modes
    for call in (lambda: store.get("a"), lambda: store.create("b", b"x"), lambda: store.put("b", [b"x"])):
        with pytest.raises(RefusedError, match="permission denied; check owner, mode and mount options"):
            await call()


async def test_a_dead_disk_is_unreachable(store, monkeypatch):
    await store.put("a", [b"x"])

    def fail(*_args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stepfs.store.local.local_store.os.preadv", fail)
    with pytest.raises(StoreUnreachableError, match=r"cannot read a .*input/output error \(errno 5\)"):
        await store.get("a")


@pytest.mark.parametrize(
    ("url", "message"), [
        ("/lake", "has no scheme"), ("lake", "has no scheme"),
        ("ftp://host/lake", "unknown scheme 'ftp'"), ("file://lake", "is not absolute"),
        ("file://host/lake", "is not absolute"),
        ("file:///a/../b", "does not name a directory"), ("s3://", "is not a bucket name"),
        ("s3://UPPER/x", "is not a bucket name"),
        ("s3://bucket/a/../b", "its parts take letters"),
        ("s3://key:secret@bucket/a", "credentials and options do not belong into a URL"),
    ],
)  # fmt: skip
def test_bad_urls_are_refused_before_anything_is_touched(url, message):
    with pytest.raises(UsageError, match=message) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


def test_urls_round_trip(tmp_path):
    for name in ("plain", "with space", "per%cent", "ünïcode", "a#b?c"):
        store = LocalStore(tmp_path / name)
        again = open_store(store.url)
        assert (again.root, again.url) == (tmp_path / name, store.url)  # type: ignore[attr-defined]


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
    monkeypatch.setattr(create_once, "_RETRY_S", (0.0, 0.0))
    unsettled = await create_once.take_slot(store, "log/1", b"mine")
    assert isinstance(unsettled, create_once.Unknown)
    assert "input/output error" in unsettled.why
    assert isinstance(await create_once.take_slot(store, "log/1", b"mine"), create_once.Unknown)
    failing.clear()
    synced = []
    monkeypatch.setattr(local_store, "sync_directory", lambda directory: (synced.append(directory), real(directory)))
    assert await create_once.take_slot(store, "log/1", b"mine") == create_once.Mine()
    assert store.root / where in synced


async def test_a_link_that_may_have_happened_is_synced_before_it_counts(store, monkeypatch):
    await store.create("log/0", b"x")
    link, synced, real = os.link, [], local_store.sync_directory  # type: ignore[attr-defined]

    def broken(*arguments, **options):
        link(*arguments, **options)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("stepfs.store.local.local_store.os.link", broken)
    monkeypatch.setattr(local_store, "sync_directory", lambda directory: (synced.append(directory), real(directory)))
    assert await create_once.take_slot(store, "log/1", b"mine") == create_once.Mine()
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


@pytest.mark.parametrize("abandons", [False, True])
async def test_a_reader_who_never_uses_its_buffer_again_leaves_a_hung_read_alone(tmp_path, monkeypatch, abandons):
    store, hangs, answers, preadv = LocalStore(tmp_path), trio.Event(), threading.Event(), os.preadv
    await store.create("a", b"abc")
    store.abandons_reads = abandons

    def hung(*arguments):
        trio.from_thread.run_sync(hangs.set)
        answers.wait()
        return preadv(*arguments)

    monkeypatch.setattr(os, "preadv", hung)
    ended = trio.Event()

    async def read() -> None:
        try:
            await store.read_into("a", 0, memoryview(bytearray(3)))
        finally:
            ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await hangs.wait()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            if not abandons:
                await trio.testing.wait_all_tasks_blocked()
                assert not ended.is_set()
                answers.set()
            await ended.wait()
    answers.set()
