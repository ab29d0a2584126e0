"""The hook a training loop calls after `dcp.save`: by URL or through a mount, on rank 0, with the store away."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trio
from lakework import list_groups, reclaim
from realmount import until

from stepfs import CheckpointHook, Lake, StreamState, training
from stepfs.errors import (
    AbsentError,
    OtherHistoryError,
    RefusedError,
    StoreUnreachableError,
    UsageError,
    WithdrawnError,
)
from stepfs.format.control import GroupRecord
from stepfs.format.ids import Step
from stepfs.lake.identity import create_lake, open_lake
from stepfs.store.local.local_store import LocalStore
from stepfs.store.opening import open_store
from stepfs_producer import AsyncProducer, Producer


@pytest.fixture
def lake(file_url: str) -> str:
    async def make() -> None:
        await create_lake(open_store(file_url), slices=1)

    trio.run(make)
    with Producer(file_url, producer_id="p") as producer:
        for step in range(40):
            producer.append([b"%d" % step], position=step)
    return file_url


def records(url: str) -> Mapping[str, GroupRecord]:
    async def read() -> Mapping[str, GroupRecord]:
        store = open_store(url)
        return await list_groups(store, await open_lake(store))

    return trio.run(read)


def kept(url: str, group: str = "run") -> list[int]:
    found = records(url)
    return list(found[group].kept) if group in found else []


def test_keep_and_dropped_are_followed(lake):
    hook = CheckpointHook(lake, group="run", keep=2)
    for next_step in (10, 20, 30):
        hook(next_step)
    assert kept(lake) == [20, 30]
    every = CheckpointHook(lake, group="every")
    for next_step in (10, 20, 30):
        every(next_step)
    every.dropped(10)
    every.dropped(11)  # never was one
    assert kept(lake, "every") == [20, 30]


def test_after_a_roll_back_what_was_saved_last_is_kept_whatever_its_number(lake):
    """The greatest two of {20, 30, 35} would hide the steps from 10 on, and let them be reclaimed."""
    hook = CheckpointHook(lake, group="run", keep=2)
    for next_step in (10, 30, 35):
        hook(next_step)
    CheckpointHook(lake, group="run").resumed(15)  # another process; its checkpoint was not on record any more
    hook(20)
    assert kept(lake) == [15, 20, 30, 35]
    hook(40)
    assert kept(lake) == [20, 40]


@pytest.mark.logs("checkpoint 20 is recorded when the store answers")
def test_what_could_not_be_said_is_said_in_order(lake, monkeypatch):
    hook = CheckpointHook(lake, group="run", keep=2)
    hook(20)
    hook(30)
    hook(35)

    async def away(*_args: object, **_options: object) -> None:
        raise StoreUnreachableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", away)
        hook.resumed(20)
    hook(40)
    assert kept(lake) == [20, 40]


def test_a_mount_says_which_lake_and_group_it_is(lake, tmp_path):
    with pytest.raises(AbsentError, match="not a stepfs mount"):
        CheckpointHook(tmp_path)
    (tmp_path / ".stepfs").mkdir()
    config = {"lake": lake, "endpoint_url": None, "group": "of-the-mount"}
    (tmp_path / ".stepfs/config.json").write_text(json.dumps(config))
    CheckpointHook(tmp_path)(5)
    CheckpointHook(Path(tmp_path), group="another")(6)
    assert (kept(lake, "of-the-mount"), kept(lake, "another")) == ([5], [6])
    config["group"] = None
    (tmp_path / ".stepfs/config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="whose checkpoints"):
        CheckpointHook(tmp_path)


def test_only_rank_0_speaks(lake, monkeypatch):
    hook = CheckpointHook(lake, group="run")
    monkeypatch.setenv("RANK", "3")
    hook(10)
    assert records(lake) == {}
    monkeypatch.setenv("RANK", "0")
    hook(10)
    assert kept(lake) == [10]


def test_an_asynchronous_save_counts_once_it_is_done_and_not_if_it_failed(lake):
    hook = CheckpointHook(lake, group="run")
    good, bad, late = Future(), Future(), Future()
    for next_step, future in ((10, good), (20, bad), (30, late)):
        hook.after(future, next_step)
    bad.set_exception(OSError("disk full"))
    good.set_result(None)
    assert kept(lake) == [10]
    late.cancel()
    late.set_running_or_notify_cancel()
    assert kept(lake) == [10]


@pytest.mark.logs("checkpoint 10 is recorded when", "checkpoint 15 is recorded")
def test_a_store_that_is_away_stops_no_training_and_forgets_no_checkpoint(lake, monkeypatch):
    """A kept checkpoint that was never recorded would lose its steps to the one recorded after it."""

    async def away(*_args: object, **_options: object) -> None:
        raise StoreUnreachableError("away")

    hook = CheckpointHook(lake, group="run", keep=2)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", away)
        hook(10)
        hook(15)
    assert records(lake) == {}
    hook(20)
    assert kept(lake) == [15, 20]


@pytest.mark.logs("is recorded when the store answers")
def test_what_could_not_be_said_is_said_when_the_store_is_back_though_nobody_calls(lake, monkeypatch):
    """Producers with `max_lead` wait for these checkpoints, and the trainer, which would call again, for the producers."""
    answers, tried = threading.Event(), threading.Event()
    create = LocalStore.create

    async def away(*arguments: Any, **options: Any) -> object:
        if answers.is_set():
            return await create(*arguments, **options)
        tried.set()
        raise StoreUnreachableError("away")

    monkeypatch.setattr(training, "_AGAIN_S", 0.01)
    monkeypatch.setattr(LocalStore, "create", away)
    hook = CheckpointHook(lake, group="run", keep=2)
    for next_step in (10, 20, 30):
        hook(next_step)
    tried.clear()
    assert tried.wait(60), "it is tried once only"
    assert records(lake) == {}
    answers.set()
    until(lambda: kept(lake) == [20, 30], "nobody tries again")
    hook(40)
    assert kept(lake) == [30, 40]


@pytest.mark.logs("is recorded when the store answers: it has not answered for")
@pytest.mark.parametrize("verb", ["get", "create"])  # of the first one: before the lake is open, and after
def test_a_store_that_is_silent_holds_no_training(lake, monkeypatch, verb):
    answers, asks = threading.Event(), getattr(LocalStore, verb)

    async def silent(*arguments: Any, **options: Any) -> object:
        await trio.to_thread.run_sync(answers.wait, abandon_on_cancel=True)
        return await asks(*arguments, **options)

    monkeypatch.setattr(training, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(LocalStore, verb, silent)
    hook, saved = CheckpointHook(lake, group="run", keep=2), Future()
    hook(10)
    hook.after(saved, 20)
    saved.set_result(None)
    hook(30)
    hook.resumed(20)
    hook.dropped(30)
    monkeypatch.setattr(LocalStore, verb, asks)
    assert records(lake) == {}
    answers.set()
    until(lambda: kept(lake) == [20], "they are recorded in their order")


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.logs("is recorded when the store answers", "is not recorded: record it with")
def test_the_end_of_a_process_tries_once_more_and_says_what_is_lost(lake, monkeypatch, caplog, answers):
    async def away(*_args: object, **_options: object) -> None:
        raise StoreUnreachableError("away")

    hook = CheckpointHook(lake, group="run")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", away)
        hook(10)
        if not answers:
            hook._running().stop()
    hook._running().stop()
    assert kept(lake) == [10] * answers
    assert ("checkpoint 10 is not recorded: record it with `stepfs checkpoint`" in caplog.text) is not answers


def test_what_cannot_be_right_is_told_to_the_caller(lake):
    hook = CheckpointHook(lake, group="run")
    with pytest.raises(UsageError, match="only 40 steps are committed"):
        hook(41)
    with pytest.raises(UsageError, match="steps count from 0"):
        hook(-1)
    hook(30)

    async def give_up() -> None:
        store = open_store(lake)
        await reclaim(store, await open_lake(store))

    trio.run(give_up)
    with pytest.raises(WithdrawnError, match="are reclaimed"):
        hook(Step(20))
    hook(35)
    assert kept(lake) == [30, 35]


@pytest.mark.logs("checkpoint 99 is recorded when", "checkpoint 4 is recorded")
def test_an_error_of_one_checkpoint_takes_no_other_with_it(lake, monkeypatch):
    async def away(*_args: object, **_options: object) -> None:
        raise StoreUnreachableError("away")

    hook = CheckpointHook(lake, group="run")
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "get", away)
        for next_step in (99, 4):
            hook(next_step)
    with pytest.raises(UsageError, match="NEXT 99: only 40 steps are committed"):
        hook(6)
    assert kept(lake) == [4, 6]
    hook(8)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", away)
        with pytest.raises(UsageError, match="NEXT 98"):
            hook(98)
    assert kept(lake) == [4, 6, 8]


@pytest.mark.logs("checkpoint not recorded: NEXT 99")
def test_an_error_while_an_asynchronous_save_is_recorded_is_raised_by_the_next_call(lake):
    hook, saved = CheckpointHook(lake, group="run"), Future()
    hook.after(saved, 99)
    saved.set_result(None)
    with pytest.raises(UsageError, match="NEXT 99"):
        hook(10)
    hook(20)
    assert kept(lake) == [10, 20]


def test_a_hook_opens_the_lake_once(lake, tmp_path, monkeypatch):
    """One that looks through the log at each checkpoint stands in the way of training beside a busy producer."""
    asked: list[str] = []

    def count(verb):
        call = getattr(LocalStore, verb)

        def counted(self, key, *args, **options):
            asked.append(f"{verb} {key.split('/')[1] if '/' in key else key}")
            return call(self, key, *args, **options)

        monkeypatch.setattr(LocalStore, verb, counted)

    for verb in ("get", "list", "create"):
        count(verb)
    by_url = CheckpointHook(lake, group="url")
    by_url(10)
    asked.clear()
    by_url(20)
    assert asked == ["get lake.msgpack", "get log", "list control", "get control", "create control"]
    (tmp_path / ".stepfs").mkdir()
    config = {"lake": lake, "endpoint_url": None, "group": "mount"}
    (tmp_path / ".stepfs/config.json").write_text(json.dumps(config))
    status = {"next_step": 40, "order_needs_from": None, "store": {"reachable": True, "trouble": None}}
    (tmp_path / ".stepfs/status.json").write_text(json.dumps(status))

    def looks(where: Path | Lake, kinds: tuple[str, ...]) -> list[str]:
        hook = CheckpointHook(where)
        asked.clear()
        hook(10)
        hook(20)
        return [each for each in asked if each.startswith(kinds)]

    assert not looks(tmp_path, ("list log", "get log"))
    with Lake(lake, group="reader") as reader:
        assert not looks(reader, ("list log",)), "it polls meanwhile"
    assert kept(lake, "mount") == kept(lake, "reader") == kept(lake, "url") == [10, 20]


def test_a_mount_that_shows_steps_that_the_lake_has_lost_records_no_checkpoint(lake, tmp_path):
    (tmp_path / ".stepfs").mkdir()
    config = {"lake": lake, "endpoint_url": None, "group": "run"}
    (tmp_path / ".stepfs/config.json").write_text(json.dumps(config))
    store = {"reachable": True, "trouble": "another history: mount again"}
    status = {"next_step": 40, "order_needs_from": None, "store": store}
    hook = CheckpointHook(tmp_path)
    (tmp_path / ".stepfs/status.json").write_text(json.dumps(status))
    with pytest.raises(OtherHistoryError, match=f"{tmp_path}: another history: mount again"):
        hook(10)
    assert kept(lake) == []
    store |= {"reachable": False, "trouble": "the store does not answer"}
    (tmp_path / ".stepfs/status.json").write_text(json.dumps(status))
    hook(10)
    assert kept(lake) == [10]
    store |= {"reachable": True, "trouble": "upgrade stepfs", "upgrade_needed": True}  # what it shows is there
    (tmp_path / ".stepfs/status.json").write_text(json.dumps(status))
    hook(20)
    assert kept(lake) == [10, 20]


class _Mounted:
    """What a mount of the lake for the group `run` says."""

    def __init__(self, lake: str, directory: Path, *, next_step: int) -> None:
        self.told = directory / ".stepfs"
        self.told.mkdir()
        config = {"lake": lake, "endpoint_url": None, "group": "run"}
        (self.told / "config.json").write_text(json.dumps(config))
        self.next_step = next_step
        self.says(None)

    def says(self, trouble: str | None) -> None:
        store = {"reachable": True, "trouble": trouble}
        status = {"next_step": self.next_step, "order_needs_from": None, "store": store}
        (self.told / "status.json").write_text(json.dumps(status))


@pytest.mark.logs("is recorded when the store answers")
@pytest.mark.parametrize("noticed", [False, True], ids=["the mount does not know yet", "the mount has noticed"])
def test_hazard_13_a_checkpoint_that_waited_for_a_store_that_is_put_back_is_not_recorded(
    lake, tmp_path, monkeypatch, noticed
):
    """The mount was asked when it was saved. Here its steps are beyond those that the older copy has; what was sent of it is
    not sent again either.
    """

    async def away(*_args: object, **_options: object) -> None:
        raise StoreUnreachableError("away")

    mounted = _Mounted(lake, tmp_path, next_step=60)
    monkeypatch.setattr(training, "_BELIEVED_S", 0.0)
    hook = CheckpointHook(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "create", away)
        hook(50)
    if noticed:
        mounted.says("another history: mount again")
    with pytest.raises(OtherHistoryError if noticed else UsageError, match=r"mount again|only 40 steps"):
        hook.resumed(10)
    assert kept(lake) == [10]


@pytest.mark.logs("another history: mount again")
@pytest.mark.parametrize("lost", [False, True])
def test_hazard_13_an_asynchronous_save_asks_the_mount_again_when_it_is_done(lake, tmp_path, monkeypatch, lost):
    mounted = _Mounted(lake, tmp_path, next_step=40)
    monkeypatch.setattr(training, "_BELIEVED_S", 0.0)
    future: Future[object] = Future()
    hook = CheckpointHook(tmp_path)
    hook.after(future, 30)
    mounted.says("another history: mount again" if lost else None)
    future.set_result(None)
    assert kept(lake) == ([] if lost else [30])


def test_a_lake_that_was_replaced_gets_no_checkpoint_of_the_former(lake):
    hook = CheckpointHook(lake, group="run")
    hook(10)
    shutil.rmtree(lake.removeprefix("file://"))

    async def make() -> None:
        await create_lake(open_store(lake), slices=1)

    trio.run(make)
    with pytest.raises(RefusedError, match="lake"):
        hook(20)
    assert records(lake) == {}


INTEGERS = [np.int64(10), np.uint8(10), torch.tensor(10), 10]
NOT_INTEGERS = [None, 10.0, "10", True, torch.tensor([1, 2]), torch.tensor(1.5)]


@pytest.mark.parametrize("kind", [Producer, AsyncProducer])
@pytest.mark.parametrize("wrong", [None, 7, b"file:///lake", Path("/lake")], ids=repr)
def test_a_lake_or_an_id_that_is_no_text_is_named(kind, wrong):
    with pytest.raises(TypeError, match=f"lake is a {type(wrong).__name__}; give text, such as 'file:"):
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
