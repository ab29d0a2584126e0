"""How long a store may be silent, in virtual time: said after a while, given up later; and answers that ask for fewer
requests are counted.
"""

from __future__ import annotations

import math

import pytest
import servers
import trio
from faultproxy import ERROR_500, SLOW_DOWN_503, TOO_MANY_429

from stepfs.errors import StoreSilentError, StoreUnreachableError
from stepfs.store.api import Put
from stepfs.store.s3.s3_store import S3Store
from stepfs.store.silence import Silence


@pytest.fixture
def heard() -> list[str]:
    """The lines for stderr."""
    return []


@pytest.fixture
def silence(heard) -> Silence:
    return Silence(heard.append, say_after_s=5.0, give_up_after_s=60.0, now_s=trio.current_time)


async def test_signs_of_life_keep_a_long_request_alive(autojump_clock, silence, heard):
    async def slow():
        for _ in range(100):
            await trio.sleep(4.9)
            silence.note_sign_of_life()
        return "done"

    assert await silence.watch("s3://x", slow) == "done"
    assert heard == []


async def test_the_line_is_said_once_for_all_that_wait_together(autojump_clock, silence, heard):
    async def ask():
        with pytest.raises(StoreUnreachableError, match=r"no answer for 60 s"):
            await silence.watch("s3://x", trio.sleep_forever)
        assert trio.current_time() - began == pytest.approx(60, abs=0.1)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(ask)
    assert heard == ["waiting for s3://x: no answer yet; gives up after 60 s"]


async def test_what_cannot_be_abandoned_reports_how_it_ended(autojump_clock, silence):
    async def create():
        with trio.CancelScope(shield=True):
            await trio.sleep(75)
        return "created"

    assert await silence.watch("s3://x", create) == "created"


async def test_after_its_end_nobody_is_hurried(autojump_clock, silence, heard):
    async def slow():
        silence.end()  # with this request under way
        await trio.sleep(100)
        return "done"

    assert await silence.watch("s3://x", slow) == "done"
    assert await silence.watch("s3://x", slow) == "done"
    assert heard == []


async def test_errors_pass_as_themselves(autojump_clock, silence):
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await silence.watch("s3://x", fail)


async def test_requests_that_fail_without_an_answer_are_one_silence(autojump_clock, silence, heard):
    """Each ends by its own time-out and is tried again: neither the line nor the end may wait for ever."""

    async def time_out():
        await trio.sleep(20.1)
        raise TimeoutError

    tries = 0
    with pytest.raises(StoreSilentError), trio.fail_after(1000):
        while True:
            tries += 1
            with pytest.raises(TimeoutError):
                await silence.watch("s3://x", time_out)
    assert tries == 3
    assert heard == ["waiting for s3://x: no answer yet; gives up after 60 s"]
    began = trio.current_time()
    with pytest.raises(StoreSilentError):  # it has been silent for long enough
        await silence.watch("s3://x", trio.sleep_forever)
    assert trio.current_time() - began < 0.1


async def test_an_answer_ends_a_silence_and_time_without_requests_is_none(autojump_clock, silence, heard):
    async def time_out():
        await trio.sleep(40)
        raise TimeoutError

    async def answer():
        silence.note_sign_of_life()

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await silence.watch("s3://x", time_out)
        await trio.sleep(50)
        await silence.watch("s3://x", answer)
    assert len(heard) == 3


async def test_more_patience_from_now_on(autojump_clock, silence, heard):
    silence.set_limit(600)
    began = trio.current_time()
    with pytest.raises(StoreSilentError, match="no answer for 600 s"):
        await silence.watch("s3://x", trio.sleep_forever)
    assert trio.current_time() - began == pytest.approx(600, abs=0.1)
    assert heard == ["waiting for s3://x: no answer yet; gives up after 600 s"]


async def test_a_limit_missed_by_a_rounding_error_is_reached_all_the_same(autojump_clock, silence):
    """A sleep of less than a clock can count does not move it, and would be slept again and again."""
    await trio.sleep_until(2.0**20 + 2)  # the last sign, below the power of two, has a bit more than the clock now

    async def last_heard_of_almost_5_s_ago():
        silence._last_sign_s = math.nextafter(trio.current_time() - 5.0, math.inf)
        await trio.sleep_forever()

    with pytest.raises(StoreSilentError):
        await silence.watch("s3://x", last_heard_of_almost_5_s_ago)


@pytest.fixture
async def store(fault_proxy, s3_url):
    prefix = s3_url.removeprefix(f"s3://{servers.BUCKET}/")
    store = S3Store(servers.BUCKET, prefix, endpoint_url=fault_proxy.endpoint_url)
    yield store
    await store.aclose()


@pytest.mark.parametrize(("trouble", "counted"), [(SLOW_DOWN_503, 1), (TOO_MANY_429, 1), (ERROR_500, 0)])
async def test_a_throttled_request_is_counted_though_its_retry_succeeds(store, fault_proxy, trouble, counted):
    fault_proxy.once("GET", "a/b", trouble)
    assert await store.get("a/b") is None
    assert (store.counts.get, store.counts.throttled) == (2, counted)


async def test_a_throttled_create_is_counted_too(store, fault_proxy):
    fault_proxy.once("PUT", "a/b", SLOW_DOWN_503)
    assert await store.create("a/b", b"x") is Put.UNKNOWN
    assert store.counts.throttled == 1
