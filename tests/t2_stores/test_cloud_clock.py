"""The store's clock behind gs:// and az://, by which objects age."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import servers
from stubs3 import Answer, stub_s3

from stepfs.store.cloud.store_clock import StoreClock


class TestStoreClock:
    def test_one_head_lasts_ten_minutes(self, monkeypatch):
        now_s = [1000.0]
        monkeypatch.setattr("stepfs.store.cloud.store_clock.time.monotonic", lambda: now_s[0])
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
        monkeypatch.setattr("stepfs.store.cloud.store_clock.time.monotonic", lambda: now_s[0])
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
