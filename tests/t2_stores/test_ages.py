"""How old a listed object is, by the store's own clock: what a reclaimer's second chance is measured with, on each
kind of store.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta

import pytest
import servers
import trio
from stubs3 import Answer, stub_s3

from stepfs.store.cloud.cloud_store import StoreClock
from stepfs.store.local.local_store import LocalStore
from stepfs.store.s3.s3_store import page_entries

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def page(date: str | None, modified: datetime) -> dict:
    headers = {} if date is None else {"date": date}
    return {
        "Contents": [{"Key": "p/a", "Size": 1, "LastModified": modified}],
        "ResponseMetadata": {"HTTPHeaders": headers},
    }


async def test_an_object_grows_older_and_is_never_called_older_than_it_is(store):
    before_s = time.monotonic()
    await store.create("g/0", b"x")
    await trio.sleep(2.5)
    assert [entry.age_s for entry in await store.list("g/")] == [0.0], "told when asked for alone"
    (entry,) = await store.list("g/", ages=True)
    assert 0.4 <= entry.age_s <= time.monotonic() - before_s + 0.1
    before_s = time.monotonic()
    await store.create("g/1", b"x")
    ages = [entry.age_s for entry in await store.list("g/", ages=True)]
    assert ages[0] >= 0.4
    assert 0.0 <= ages[1] <= time.monotonic() - before_s + 0.1


def test_s3_ages_are_the_answers_own_date_less_a_second_of_resolution() -> None:
    (entry,) = page_entries(page("Sun, 01 Mar 2026 12:00:00 GMT", NOW - timedelta(seconds=90)), "p/", ages=True)
    assert (entry.key, entry.age_s) == ("a", 89.0)


@pytest.mark.parametrize("date", [None, "", "yesterday", "99 99 99"])
def test_s3_without_a_readable_date_every_object_is_new(date: str | None) -> None:
    (entry,) = page_entries(page(date, NOW - timedelta(days=90)), "p/", ages=True)
    assert entry.age_s == 0.0


def test_s3_an_object_from_the_future_is_new() -> None:
    (entry,) = page_entries(page("Sun, 01 Mar 2026 12:00:00 GMT", NOW + timedelta(days=90)), "p/", ages=True)
    assert entry.age_s == 0.0


async def test_a_mtime_that_was_set_back_makes_a_file_no_older(tmp_path):
    store = LocalStore(tmp_path)
    await store.create("g/0", b"x")
    os.utime(tmp_path / "g/0", (0, 0))
    (entry,) = await store.list("g/", ages=True)
    assert entry.age_s < 60


async def test_our_own_clock_has_no_part_in_ages(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    await store.create("g/0", b"x")
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 10 * 3600)
    (entry,) = await store.list("g/", ages=True)
    assert entry.age_s < 60


async def test_asking_the_file_system_for_its_time_leaves_nothing_and_needs_no_right(tmp_path):
    store = LocalStore(tmp_path)
    await store.create("g/0", b"x")
    await store.list("g/", ages=True)
    assert list((tmp_path / ".stepfs-tmp").iterdir()) == []
    (tmp_path / ".stepfs-tmp").rmdir()
    tmp_path.chmod(0o555)
    try:
        (entry,) = await LocalStore(tmp_path).list("g/", ages=True)
    finally:
        tmp_path.chmod(0o755)
    assert entry.age_s < 60


class TestStoreClock:
    def test_one_head_lasts_ten_minutes(self, monkeypatch):
        now_s = [1000.0]
        monkeypatch.setattr("stepfs.store.cloud.cloud_store.time.monotonic", lambda: now_s[0])
        with stub_s3() as stub:
            stub.answer = lambda _method, _path: Answer(400)
            clock = StoreClock(stub.endpoint_url)
            first = clock.now()
            now_s[0] += 599.0
            second = clock.now()
            assert stub.requests == [("HEAD", "/")]
            assert (second - first).total_seconds() == 599.0
            now_s[0] += 1.0
            clock.now()
            assert len(stub.requests) == 2
        assert abs((first - datetime.now(UTC)).total_seconds()) < 60

    def test_a_server_that_does_not_answer_tells_no_time(self):
        assert StoreClock(f"http://127.0.0.1:{servers.free_port_of_nobody()}").now() is None

    def test_a_server_that_tells_none_is_asked_once_a_minute(self, monkeypatch):
        now_s = [1000.0]
        monkeypatch.setattr("stepfs.store.cloud.cloud_store.time.monotonic", lambda: now_s[0])
        with stub_s3() as stub:
            stub.answer = lambda _method, _path: Answer(200, headers={f"X-{n}": "" for n in range(101)})
            clock = StoreClock(stub.endpoint_url)  # more headers than http.client takes: no answer
            assert [clock.now(), clock.now()] == [None, None]
            assert len(stub.requests) == 1
            now_s[0] += 60.0
            assert clock.now() is None
            assert len(stub.requests) == 2

    async def test_without_a_time_every_object_is_new(self, cloud, monkeypatch):
        monkeypatch.setattr(StoreClock, "_ask", lambda _self: None)
        store = cloud.through()
        await store.put("g/0", [b"x"])
        monkeypatch.setattr(time, "time", lambda: 4e9)
        assert [entry.age_s for entry in await store.list("g/", ages=True)] == [0.0]
