"""A wrong type in a call of the Python API is named at the door, and any type that is an integer counts steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from lakework import list_groups

from stepfs import CheckpointHook, StreamState
from stepfs.errors import UsageError
from stepfs.lake.identity import create_lake, open_lake
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer, Producer

INTEGERS = [np.int64(10), np.uint8(10), torch.tensor(10), 10]
NOT_INTEGERS = [None, 10.0, "10", True, torch.tensor([1, 2]), torch.tensor(1.5)]


@pytest.fixture
def lake(file_url: str) -> str:
    trio.run(partial(create_lake, open_store(file_url), slices=1))
    with Producer(file_url, producer_id="p") as producer:
        for step in range(20):
            producer.append([b"x"], position=step)
    return file_url


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
@pytest.mark.parametrize("wrong", [None, 7, b"file:///lake", Path("/lake")], ids=repr)
def test_a_lake_or_an_id_that_is_no_text_is_named(kind, wrong):
    with pytest.raises(TypeError, match=f"lake_url is a {type(wrong).__name__}; give text, such as 'file:"):
        kind(wrong, producer_id="p")
    with pytest.raises(UsageError, match=f"producer_id is a {type(wrong).__name__}; give text") as caught:
        kind("file:///lake", producer_id=wrong)
    assert isinstance(caught.value, TypeError)
    with pytest.raises(TypeError, match="the lake is a"):
        open_store(wrong)


@pytest.mark.parametrize("step", INTEGERS, ids=lambda step: type(step).__name__)
def test_a_step_is_any_integer(lake, step):
    async def kept():
        store = open_store(lake)
        return list((await list_groups(store, await open_lake(store)))["run"].kept)

    CheckpointHook(lake, group="run")(step)
    assert trio.run(kept) == [10]
    state = StreamState(lake_id="l", slices=1)
    state.next_step = step
    saved = state.state_dict()["next_step"]
    assert (saved, type(saved)) == (10, int)
    assert type(StreamState(lake_id="l", slices=1, next_step=step).next_step) is int
    other = StreamState(lake_id="l", slices=1)
    other.load_state_dict({"lake_id": "l", "slices": 1, "next_step": step})
    assert (other.next_step, type(other.next_step)) == (10, int)


@pytest.mark.parametrize("step", NOT_INTEGERS, ids=repr)
def test_a_step_that_is_no_integer_is_named_and_does_not_stay_with_the_hook(lake, step):
    hook = CheckpointHook(lake, group="run")
    for say in (hook, hook.resumed, hook.dropped):
        with pytest.raises(TypeError, match=r"next_step is .*give an integer"):
            say(step)
    hook(10)
    state = StreamState(lake_id="l", slices=1)
    with pytest.raises(TypeError, match=r"next_step is .*give an integer"):
        state.load_state_dict({"lake_id": "l", "slices": 1, "next_step": step})
