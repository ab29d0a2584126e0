"""The scrape port: on 127.0.0.1 unless told otherwise, and two paths; and looks at what may be silent."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import contextmanager

import pytest
import servers
import trio
from prometheus_client.registry import CollectorRegistry
from trio.testing import wait_all_tasks_blocked

from stepfs._internal import control_files, scrape
from stepfs.errors import RefusedError
from stepfs.mount.options import MountOptions


@contextmanager
def serving(**options):
    (port,) = servers.free_ports(1)
    with scrape.served(port, CollectorRegistry(), **options):
        yield port


def ask(port, path, *, address="127.0.0.1", method="GET"):
    connection = http.client.HTTPConnection(address, port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_only_metrics_and_healthz_are_there():
    with serving() as port:
        assert ask(port, "/metrics")[0] == 200
        assert ask(port, "/metrics?name[]=x")[0] == 200
        assert ask(port, "/healthz") == (200, "ok\n")
        for path in ("/", "/favicon.ico", "/metrics/", "/metrics/x", "/healthz/..", "/.stepfs"):
            assert ask(port, path)[0] == 404, path
        assert ask(port, "/metrics", method="POST")[0] in {405, 501}


def test_other_addresses_of_this_machine_answer_only_when_asked_to():
    with serving() as port, pytest.raises(ConnectionRefusedError):
        ask(port, "/metrics", address="127.0.0.2")
    with serving(address="0.0.0.0") as port:
        assert ask(port, "/metrics", address="127.0.0.2")[0] == 200


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_of_ip_version_6():
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no ::1 here")
    with serving(address="::1") as port:
        assert ask(port, "/metrics", address="::1")[0] == 200


def test_an_address_of_another_machine_is_refused_by_name():
    with pytest.raises(RefusedError, match=r"192\.0\.2\.1: .*--metrics-address"), serving(address="192.0.2.1"):
        pass


def test_the_default_is_loopback_and_the_option_travels_to_the_daemon(tmp_path):
    options = MountOptions("file:///lake", tmp_path)
    assert options.metrics_address == scrape.LOOPBACK == "127.0.0.1"
    asked = MountOptions("file:///lake", tmp_path, metrics_address="0.0.0.0")
    assert MountOptions.from_map(asked.to_map())[0].metrics_address == "0.0.0.0"


async def test_health_is_that_of_the_event_loop(monkeypatch):
    monkeypatch.setattr(scrape, "_TURN_S", 1.0)
    with serving(healthy=scrape.loop_turns()) as port:
        assert await trio.to_thread.run_sync(ask, port, "/healthz") == (200, "ok\n")
        answers, stands_still, answered = [], threading.Event(), threading.Event()

        def asked():
            stands_still.wait()
            answers.append(ask(port, "/healthz"))
            answered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, asked)
            await wait_all_tasks_blocked()
            stands_still.set()
            assert answered.wait(20)
        assert answers == [(503, "stuck\n")]
        assert await trio.to_thread.run_sync(ask, port, "/healthz") == (200, "ok\n")


def test_of_one_device_one_looks_at_a_time_and_one_that_hangs_costs_a_thread():
    hung, began = threading.Event(), threading.Semaphore(0)

    def look() -> str:
        began.release()
        hung.wait()
        return "seen"

    before = threading.active_count()
    assert [control_files.answer_within(look, 0.01, device="0:7") for _ in range(5)] == [None] * 5
    assert (threading.active_count() - before, began.acquire(), began.acquire(blocking=False)) == (1, True, False)
    assert control_files.answer_within(lambda: "seen", device="0:8") == "seen"
    hung.set()
    assert control_files.answer_within(look, device="0:7") == "seen"


def test_a_look_that_fails_or_cannot_begin_leaves_the_turn_to_the_next(monkeypatch):
    def fails() -> str:
        raise OSError(5, "bad")

    assert isinstance(control_files.answer_within(fails, device="0:7"), OSError)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        control_files.answer_within(lambda: "seen", device="0:7")
    assert control_files.answer_within(lambda: "seen", device="0:7") == "seen"
