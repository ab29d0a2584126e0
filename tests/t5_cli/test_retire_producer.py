"""`stepfs retire-producer`, and what becomes of uploads that nobody can commit any more."""

from __future__ import annotations

import json

import pytest
import trio
from lakes import commit, stepfs

from stepfs.errors import FencedError
from stepfs.format.ids import Epoch
from stepfs.format.keys import data_key, data_prefix
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store
from stepfs_producer import Producer


def upload(url: str, producer: str, *, epoch: int, seq: int) -> None:
    """An upload that its producer did not live to commit."""

    async def put() -> None:
        store = open_store(url)
        await store.put(data_key((await open_lake(store)).lake_id, producer, Epoch(epoch), seq), [b"x"])

    trio.run(put)


def objects(url: str) -> int:
    async def count() -> int:
        store = open_store(url)
        return len(await store.list(data_prefix((await open_lake(store)).lake_id)))

    return trio.run(count)


@pytest.fixture
def lake(file_url: str) -> str:
    assert stepfs("init", file_url, "--slices", "3").code == 0
    commit(file_url, range(3))
    upload(file_url, "tok-0", epoch=1, seq=3)
    return file_url


def test_what_a_silent_producer_left_goes_once_it_is_retired(lake):
    assert stepfs("reclaim", lake).code == 0
    assert objects(lake) == 4, "it might come back and commit it"
    ended = stepfs("retire-producer", lake, "tok-0")
    assert ended.code == 0
    assert "fenced" in ended.out
    assert stepfs("reclaim", lake).code == 0
    assert objects(lake) == 3, "what is committed stays"


def test_it_says_so_when_there_is_nothing_to_do(lake):
    first = json.loads(stepfs("retire-producer", lake, "tok-0", "--json").out)
    of = {"lake": lake, "lake_id": stepfs("status", lake, "--json").document["lake_id"]}
    again = json.loads(stepfs("retire-producer", lake, "tok-0", "--json").out)
    expected = {"schema": 1, **of, "producer": "tok-0", "epoch": 2, "next_seq": 3, "retired": True, "sealed": False}
    assert first == {**expected, "changed": True}
    assert again == {**expected, "changed": False}
    assert "already" in stepfs("retire-producer", lake, "tok-0").out


def test_an_unknown_id_is_refused(lake):
    ended = stepfs("retire-producer", lake, "tok-1")
    assert (ended.code, ended.err.count("\n")) == (3, 1)
    assert "'tok-1'" in ended.err


def test_a_live_producer_is_fenced_and_a_later_start_goes_on(lake):
    with pytest.raises(FencedError), Producer(lake, producer_id="tok-0") as producer:
        assert stepfs("retire-producer", lake, "tok-0").code == 0
        producer.append([b"a", b"b", b"c"], position=4)
        producer.flush()
    with Producer(lake, producer_id="tok-0") as producer:
        assert producer.position == 3


def test_on_a_sealed_lake_every_upload_that_was_not_committed_goes(lake):
    upload(lake, "tok-0", epoch=1, seq=9)
    upload(lake, "stranger", epoch=1, seq=0)
    assert stepfs("seal", lake).code == 0
    ended = stepfs("retire-producer", lake, "tok-0")
    assert (ended.code, "sealed" in ended.out) == (0, True)
    assert stepfs("retire-producer", lake, "nobody").code == 3
    assert stepfs("reclaim", lake).code == 0
    assert objects(lake) == 3
