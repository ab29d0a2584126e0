"""`.stepfs/`, the access log, the guard, and the options that travel to the daemon."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from pathlib import Path

import json_schemas
import msgpack
import pytest
import trio
import trio.testing
from fakemount import FACTS, ROOT, Caller, fails, mounted
from faketable import FakeTable
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from stepfs._internal.histogram import Histogram
from stepfs.data.counters import DataCounts
from stepfs.data.waiting import Cause
from stepfs.errors import RefusedError, UsageError
from stepfs.format.arguments import parse_duration, parse_interval, parse_size
from stepfs.format.commit import COMMIT_ID_BYTES, DIGEST_BYTES, Commit, CommitKind, encode_commit
from stepfs.format.ids import Epoch, Step, Version
from stepfs.format.keys import log_prefix, numbered
from stepfs.mount import metrics, status
from stepfs.mount.fuse.guard import ACCESSLOG_LINES, Meter
from stepfs.mount.options import MountOptions
from stepfs.mount.redact import redact_url
from stepfs.store.api import Counts
from stepfs.view.ranks import parse_ranks, parse_steps


async def test_the_control_directory_lists_what_it_has():
    async with mounted() as m:
        m.commit(3)
        assert await m.names(".stepfs") == [
            "status.json", "metrics", "config.json", "accesslog", "trace", "steps", "wait", "order",
        ]  # fmt: skip
        assert await m.names(".stepfs", "steps") == ["0.json", "1.json", "2.json"]
        assert await m.read(".stepfs", "steps", "1.json") == b"step 1\n"
        for name in ("3.json", "01.json", "1", "x.json", ".json"):
            with fails(errno.ENOENT):
                await m.lookup(".stepfs", "steps", name)
        with fails(errno.ENOENT):
            await m.lookup(".stepfs", "nothing")


async def test_content_is_fixed_when_a_file_is_opened_and_never_cached_by_the_kernel():
    async with mounted() as m:
        inode = (await m.lookup(".stepfs", "status.json")).st_ino
        opened = await m.ops.open(inode, 0, Caller())
        assert opened.direct_io
        m.commit(5)
        assert await m.ops.read(opened.fh, 0, 3) + await m.ops.read(opened.fh, 3, 100) == b"next 0\n"
        assert await m.read(".stepfs", "status.json") == b"next 5\n"


async def test_who_unmounts_is_told_of_every_open_file_and_holds_back_those_that_come(autojump_clock):
    async with mounted(deadline_s=20.0) as m:
        m.commit()

        def busy():
            return fails(errno.EBUSY)

        inode = (await m.lookup("step-000000000", "rank-00000.pt")).st_ino
        opened = await m.ops.open(inode, 0, Caller())
        with busy():
            await m.lookup(".stepfs", "leave")
        await m.ops.release(opened.fh)
        listed = await m.ops.opendir(ROOT, Caller())
        with busy():
            await m.lookup(".stepfs", "leave")
        await m.ops.releasedir(listed)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.read, ".stepfs", "wait", "1")
            await trio.testing.wait_all_tasks_blocked()
            with busy():
                await m.lookup(".stepfs", "leave")
            m.commit()
        with fails(errno.EACCES):
            await m.ops.lookup((await m.lookup(".stepfs")).st_ino, b"leave", Caller(uid=12345))

        free = await m.lookup(".stepfs", "leave")
        assert (free.entry_timeout, free.attr_timeout) == (0, 0)  # each question reaches the daemon
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.ops.open, inode, 0, Caller())
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert len(m.files) == 0
            with busy():
                await m.lookup(".stepfs", "leave")
        assert len(m.files) == 1  # nobody unmounted: it goes on


@pytest.mark.parametrize(
    "who", ["a loader", "a reader that is gone", "one in another pid namespace", "the one who asks"]
)
async def test_who_opens_file_after_file_is_busy_between_two(autojump_clock, who):
    """A loader has no file open between two samples."""
    with subprocess.Popen(["sleep", "600"]) as sleeps:  # noqa: ASYNC220 - it is there at once
        try:
            await _unmounted_between_two(who, sleeps)
        finally:
            sleeps.kill()


async def _unmounted_between_two(who: str, sleeps: subprocess.Popen[bytes]) -> None:
    reader = {"one in another pid namespace": 0, "the one who asks": os.getppid()}.get(who, sleeps.pid)
    async with mounted() as m:
        m.commit()
        await m.read("step-000000000", "rank-00000.pt", pid=reader)
        if who == "a reader that is gone":
            sleeps.kill()
            sleeps.wait()
        if who in {"a loader", "one in another pid namespace"}:
            with fails(errno.EBUSY):
                await m.lookup(".stepfs", "leave", pid=os.getpid())
            await trio.sleep(10)
        await m.lookup(".stepfs", "leave", pid=os.getpid())


async def test_directories_are_no_files_and_files_no_directories():
    async with mounted() as m:
        m.commit()
        with fails(errno.EISDIR):
            await m.ops.open((await m.lookup(".stepfs", "wait")).st_ino, 0, Caller())
        with fails(errno.ENOTDIR):
            await m.names(".stepfs", "metrics")
        with fails(errno.ENOTDIR):
            await m.ops.lookup((await m.lookup("step-000000000", "rank-00000.pt")).st_ino, b"x", Caller())


async def test_the_access_log_keeps_the_newest_and_cannot_be_broken_by_names():
    async with mounted() as m:
        with fails(errno.ENOENT):
            await m.ops.lookup(ROOT, b"evil\n\xff) OK", Caller())
        text = (await m.read(".stepfs", "accesslog")).decode()
        line = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z \w+\(.*\) \w+ <\d+\.\d{6}>$")
        assert all(line.match(entry) for entry in text.splitlines())
        assert r"lookup(1, evil\n\\xff) OK) ENOENT" in text
        for _ in range(2 * ACCESSLOG_LINES):
            await m.ops.getattr(ROOT, Caller())
        assert len(m.meter.accesses) == ACCESSLOG_LINES


@pytest.mark.logs("getattr.* failed unexpectedly", "forget.* failed unexpectedly")
async def test_an_unexpected_exception_is_eio_and_the_mount_lives(monkeypatch):
    async with mounted() as m:
        monkeypatch.setattr("stepfs.view.attributes.root", lambda _: 1 / 0)
        with fails(errno.EIO):
            await m.ops.getattr(ROOT, Caller())
        await m.ops.forget([("no inode", 1)])  # may not raise at all
        assert m.meter.faults == 2
        assert m.meter.errors["getattr", errno.EIO] == 1


@pytest.mark.parametrize(
    ("trouble", "upgrade", "up"), [(None, False, 1), ("no answer", False, 0), ("a later version", True, 1)]
)
def test_a_store_with_what_only_a_later_version_reads_is_up(trouble, upgrade, up):
    facts = {"store": {"trouble": trouble, "upgrade_needed": upgrade}}
    levels = [float(metrics.GAUGES[name][1](facts)) for name in ("store_up", "upgrade_needed")]
    assert levels == [up, upgrade]


def test_counters_are_prometheus_text():
    meter = Meter()
    meter.done("lookup", (1, b"x"), 0.5, errno.ENOENT)
    meter.done("lookup", (1, b"x"), 0.25, 0)
    data, lag, waits = DataCounts(hits=4), Histogram(), {("commit", Cause.UNREACHABLE): Histogram()}
    waits["commit", Cause.UNREACHABLE].observe(2.0)
    for seconds in (0.0004, 0.02, 1000.0):
        lag.observe(seconds)
    data.fetch_seconds.observe(0.003)
    collector = metrics.MountCollector(meter, Counts(get=3), data, lambda: FACTS, waits, lag, {"lake_id": "0" * 32})
    text = metrics.render(metrics.registry_of(collector))
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["stepfs_requests_total", "lookup"] == 2
    assert samples["stepfs_request_seconds_sum", "lookup"] == 0.75
    assert samples["stepfs_request_seconds_count", "lookup"] == 2
    assert samples["stepfs_request_seconds_bucket", "0.25", "lookup"] == 1
    assert samples["stepfs_commit_visible_seconds_bucket", "0.00025"] == 0
    assert samples["stepfs_commit_visible_seconds_bucket", "0.0005"] == 1
    assert samples["stepfs_commit_visible_seconds_bucket", "300"] == 2
    assert samples["stepfs_commit_visible_seconds_bucket", "+Inf"] == 3
    assert samples["stepfs_fetch_seconds_count",] == 1
    assert samples["stepfs_reader_wait_seconds_count", "unreachable", "commit"] == 1
    assert samples["stepfs_reader_wait_seconds_sum", "unreachable", "commit"] == 2
    assert samples["stepfs_request_errors_total", "ENOENT", "lookup"] == 1
    assert samples["stepfs_store_requests_total", "get"] == 3
    assert samples["stepfs_data_hits_total",] == 4
    assert samples["stepfs_frontier_step",] == 1


class OneObject:
    def __init__(self, key, body):
        self.key, self.body = key, body

    async def get(self, key, *, bytes_max=0):
        await trio.lowlevel.checkpoint()
        return self.body if key == self.key else None


async def test_a_steps_facts_and_its_producers_position():
    table = FakeTable()
    table.commit(1)
    entry, lake_id = table.make_entry(0), table.identity.lake_id
    commit = Commit(
        version=Version(0), lake_id=lake_id, kind=CommitKind.EPOCH, commit_id=bytes(COMMIT_ID_BYTES),
        prev_digest=bytes(DIGEST_BYTES), producer_id="tok-0", epoch=Epoch(1), incarnation=bytes(COMMIT_ID_BYTES),
        next_seq=0, position=msgpack.packb({"file": "a.txt", b"\xff": [1, b"\x00\x01"], 3: None}), first_step=Step(0),
        tgbs=(), time_ms=1, total_bytes=0, total_records=0,
    )  # fmt: skip
    store = OneObject(numbered(log_prefix(lake_id), 0), encode_commit(commit))
    document = json.loads(await status.describe_step(store, lake_id, table.state, entry))
    assert document["position"] == {"file": "a.txt", "b'\\xff'": [1, {"base64": "AAE="}], "3": None}
    assert (document["step"], document["producer"], document["epoch"]) == (0, "tok-0", 1)
    json_schemas.check("step", document)
    assert document["object"] == entry.tgb.key
    assert [s["crc32c"] for s in document["slices"]] == [f"{entry.tgb.slice(i).crc32c:08x}" for i in (0, 1)]
    gone = await status.describe_step(OneObject("", b""), lake_id, table.state, entry)
    assert json.loads(gone)["position"] is None
    json_schemas.check("step", json.loads(gone))


options = st.builds(
    MountOptions, lake=st.just("s3://b/p"), directory=st.just(Path("/m")),
    ranks=st.none() | st.lists(st.integers(0, 9)).map(tuple), steps=st.none() | st.integers(0, 9).map(range),
    wait_s=st.none() | st.floats(0, 1e6), cache_dir=st.none() | st.just(Path("/c")), prime=st.booleans(),
    group=st.none() | st.text(),
)  # fmt: skip


@given(options)
def test_options_travel_to_the_daemon_unchanged(given_options):
    sent = json.loads(json.dumps(given_options.to_map()))
    assert MountOptions.from_map(sent) == (given_options, [])


@given(
    options,
    st.sets(st.sampled_from(sorted(MountOptions.__slots__)), max_size=5),
    st.sets(st.text(min_size=1), max_size=3),
)
def test_options_of_another_version_have_more_or_fewer_names(given_options, lacking, more):
    sent = given_options.to_map()
    lacking -= {"lake", "directory"}
    more -= sent.keys()
    there = {name: value for name, value in sent.items() if name not in lacking} | dict.fromkeys(more, 7)
    found, strange = MountOptions.from_map(there)
    assert strange == sorted(more)
    for name in MountOptions.__slots__:
        of = MountOptions("a", Path("/b")) if name in lacking else given_options
        assert getattr(found, name) == getattr(of, name)


def test_an_option_of_another_version_that_changes_what_is_read_is_not_left_out():
    sent = MountOptions("a", Path("/b"), world=4).to_map()
    assert sent["fixed"] == ["lake", "world"]
    with pytest.raises(RefusedError, match="mounted with files, which this stepfs does not have"):
        MountOptions.from_map(sent | {"files": "pixels", "fixed": [*sent["fixed"], "files"]})


def test_no_secret_is_shown():
    shown = MountOptions("s3://k:secret@b/p?x=secret", Path("/m"), endpoint_url="http://u:secret@h:1/?t=secret").typed()
    assert "secret" not in json.dumps(shown)
    assert redact_url("file:///a/b") == "file:///a/b"
    assert redact_url("file:///a/b#2?x") == "file:///a/b#2?x"  # a path: cut, it would name another lake


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("8G", 8 << 30), ("1.5k", 1536), ("10", 10), ("512MiB", 512 << 20), ("8Gi", 8 << 30), ("2P", 2 << 50)],
)
def test_sizes(text, bytes_):
    assert parse_size(text) == bytes_


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("5", 5), ("2.5s", 2.5), ("2m", 120), ("1h30m", 5400), ("7d", 604800), ("1h0.5s", 3600.5)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


def test_steps_are_half_open_and_ranks_inclusive():
    assert parse_steps("0:100") == range(100)
    assert parse_ranks("0-3,8, 6-7") == (0, 1, 2, 3, 6, 7, 8)


@pytest.mark.parametrize(
    ("parse", "text"), [
        (parse_steps, "5"), (parse_steps, "5:5"), (parse_steps, "-1:5"), (parse_steps, "0:٣"),
        (parse_steps, f"0:{2**41}"), (parse_ranks, "3-1"), (parse_ranks, ""), (parse_ranks, "0-2000000"),
        (parse_size, "8X"), (parse_size, "-1"), (parse_size, "8GB"), (parse_size, "8i"), (parse_duration, ""), (parse_duration, "5m1h"), (parse_duration, "1w"), (parse_duration, "1 s"), (parse_duration, "inf"),
        (parse_interval, "0"),
    ],
)  # fmt: skip
def test_values_that_mean_nothing_are_usage_errors(parse, text):
    with pytest.raises(UsageError, match=re.escape(repr(text))):
        parse(text)
