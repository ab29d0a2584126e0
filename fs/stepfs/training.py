"""The two calls of a training loop: its resume state, and the hook for checkpoints.

stream = StreamState.of_mount("/mnt/run", world=8)       # saved by `dcp.save`: where to continue
durable = CheckpointHook("/mnt/run", keep=2)             # `durable(stream.next_step)` records a checkpoint
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import trio

from stepfs._internal.background import BackgroundLoop
from stepfs._internal.control_files import read_control_file, read_status
from stepfs.checkpoints.record import breaks_order, check_on_mount, record_checkpoint
from stepfs.errors import (
    AbsentError,
    ClosedError,
    OtherHistoryError,
    RefusedError,
    StepfsError,
    StoreUnreachableError,
    UsageError,
)
from stepfs.format.arguments import STATE_VERSION, check_integer, check_state_version
from stepfs.format.identity import check_group
from stepfs.format.ids import INTEGER_MAX
from stepfs.lake.control import Control
from stepfs.lake.identity import check_identity, open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import check_resumable
from stepfs.reader.lake import Lake
from stepfs.store.api import Store
from stepfs.store.opening import open_store
from stepfs.view.mounted import mounted_lake

if TYPE_CHECKING:
    from concurrent.futures import Future

_log = logging.getLogger("stepfs.training")

_AGAIN_S = 30.0  # between attempts at what no store took
_PATIENCE_S = 5.0  # of a call in the training loop
_BELIEVED_S = 10.0  # in which no store is put back: of what a mount says
_LOOKS_MAX: Final = 3  # each sees what was committed before; a reclaim may mislead one


class StreamState:
    """The position of a training run in a lake; a `torch.distributed.checkpoint` `Stateful` without importing torch.

    `next_step` is the first step that has not been trained on: set it to `step + 1` after the optimizer's step, and
    start reading there after `load_state_dict`.
    """

    def __init__(
        self, *, lake_id: str, slices: int, next_step: int = 0, origins: Mapping[str, int] | None = None
    ) -> None:
        """`origins`: for each lake that this one was forked from, the step below which its steps are the same here."""
        self._object_of: Callable[[int], str | None] | None = None  # as `Lake.object_of`
        self.lake_id = lake_id
        self.slices = slices
        self._origins = dict(origins or {})
        self.next_step = check_integer(next_step, "next_step")

    @classmethod
    def of_mount(cls, directory: str | Path, *, world: int | None = None) -> Self:
        """The identity of the lake mounted on `directory`; `AbsentError` if it is not a stepfs mount.

        `world`: the number of reading ranks; `RefusedError` if the mount shows another number, because some slices
        would be read twice, or never.
        """
        document: Any = read_status(Path(directory))
        if world is not None and world != document["world"]:
            raise RefusedError(
                f"{directory} shows {document['world']} ranks, the trainer has {world}: mount it with --world {world}, or its --mesh"
            )
        stream = cls(
            lake_id=document["lake_id"],
            slices=document["slices"],
            origins={one["lake_id"]: one["cut"] for one in document["origins"]},
        )
        stream._object_of = partial(_object_on_mount, Path(directory))
        return stream

    @classmethod
    def of_lake(cls, lake: Lake) -> Self:
        """The identity of a lake that is read without a mount."""
        assert lake.lake_id is not None
        stream = cls(lake_id=lake.lake_id, slices=lake.slices, origins=lake.origin_cuts)
        stream._object_of = lake.object_of
        return stream

    def state_dict(self) -> dict[str, object]:
        """The state for a checkpoint: the same on every rank, for any world size."""
        next_step = check_integer(self.next_step, "next_step")
        behind = None  # the object of the step before: in another history of the lake it is another one
        if self._object_of is not None and next_step > 0:
            with suppress(StepfsError):  # a checkpoint does not fail for that
                behind = self._object_of(next_step - 1) or None
        state = {"lake_id": self.lake_id, "next_step": next_step, "slices": self.slices, "behind": behind}
        return {"version": STATE_VERSION, **state}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume. `RefusedError` for the state of another lake, unless this one was forked from it and has all its steps
        up to there, of another number of slices per step, or of steps that the lake has lost, or does not have yet.
        """
        check_state_version(state)
        lake_id, next_step, slices = (state.get(name) for name in ("lake_id", "next_step", "slices"))
        next_step = check_integer(next_step, "not the state of a stepfs stream: next_step")
        if not 0 <= next_step <= INTEGER_MAX:
            raise UsageError(f"not the state of a stepfs stream: next_step is {next_step!r}")
        check_resumable(lake_id, next_step, self.lake_id, self._origins)
        if slices != self.slices:
            raise RefusedError(f"the checkpoint counted steps of {slices} slices, here a step has {self.slices}")
        behind = state.get("behind")
        found = None
        if behind and self._object_of is not None:
            with suppress(ClosedError):  # a `Lake` that was closed meanwhile cannot tell, either
                found = self._object_of(next_step - 1)
        if found not in (None, behind):  # None: reclaimed, so nobody can tell
            late = "" if found else ", or, from a replica that is behind, later"
            raise RefusedError(
                f"the checkpoint was trained up to step {next_step - 1} of lake {lake_id}, and here {'is another' if found else 'is no'}"
                f" such step: the store was put back to an older copy; resume from an earlier checkpoint{late}"
            )
        self.next_step = next_step


def _object_on_mount(directory: Path, step: int) -> str | None:
    if step >= int(str(read_status(directory)["next_step"])):
        return ""
    with suppress(AbsentError):  # reclaimed
        return str(json.loads(read_control_file(directory, f"steps/{step}.json"))["object"])
    return None


class CheckpointHook:
    """Records in the lake which checkpoints are durable. Every rank may call it; only rank 0 writes.

    A store that does not answer does not stop the training: after 5 s a call returns, and its record is repeated every
    half minute, and with the next checkpoint; until then the lake keeps more steps than needed, and producers with
    `max_lead` may wait.
    """

    def __init__(
        self,
        where: str | Path | Lake,
        *,
        group: str | None = None,
        keep: int | None = None,
        pace: bool = False,
        endpoint_url: str | None = None,
    ) -> None:
        """`where`: a mount or a `Lake`, whose group is used unless `group` is given, or a lake's URL. `keep`: the number
        of newest checkpoints that the trainer keeps; None if it keeps all, or calls `dropped`. `pace`: the hook records no
        checkpoints, but where training is (call it after each step): producers' `max_lead` counts from there, and no step is
        held. Checkpoints need another hook.

        `UsageError` without a group, `AbsentError` if `where` is not a mount.
        """
        self._reads = where if isinstance(where, Lake) else None
        if isinstance(where, Lake):
            group, endpoint_url = group or where.group, endpoint_url or where.options.endpoint_url
            where = where.url
        self._lake, self._endpoint_url = str(where), endpoint_url
        self._mounted: Path | None = None
        if "://" not in self._lake:
            mounted = mounted_lake(Path(where))
            self._mounted = Path(where)
            self._lake, self._endpoint_url = mounted.lake, endpoint_url or mounted.endpoint_url
            group = group or mounted.group
        if group is None:
            raise UsageError(f"whose checkpoints are these? Name a group, or mount {where} with --group")
        self._group = check_group(group)
        self._keep = keep
        self._pace = pace
        if pace and keep is not None:
            raise UsageError("a pace keeps no checkpoints: give `keep` to the hook that records these")
        self._committed = 0  # steps, as far as the mount, or the `Lake`, has said
        self._asked_s = -math.inf  # when the mount said so
        self._loop: BackgroundLoop[_Recorder] | None = None
        self._starting = threading.Lock()  # futures call back from their own threads

    def __call__(self, next_step: int) -> None:
        """Record a durable checkpoint that resumes at `next_step`: call it when `dcp.save` has returned.

        `RefusedError` if readers of this mount, or a `ShuffledSteps` of this `Lake` or of a `StepDataset` on it, are
        inside a shuffled order and `next_step` is beyond its first step: pass `ShuffledSteps.next_step`. A hook on a URL
        knows of none. Errors of earlier checkpoints, too: all that can be recorded is recorded first.
        """
        if _rank() == 0:  # a pace releases no step of an order
            self._check(0 if self._pace else check_integer(next_step, "next_step"))
        self._add(next_step)

    def resumed(self, next_step: int) -> None:
        """Record that training resumed from the checkpoint at `next_step`: call it after loading, before the next
        save.

        That checkpoint is kept from now on. Greater ones stay until the trainer has passed them, but no longer count
        among the `keep` newest: they belong to an abandoned branch. `WithdrawnError` when the checkpoint's steps are
        reclaimed.
        """
        self._add(next_step, resumed=True)

    def after(self, future: Future[object], next_step: int) -> None:
        """Record the checkpoint once the future of `dcp.async_save` is done; a failed save is not recorded.

        `RefusedError` at once, as a call of the hook. An error while it is recorded is logged, and raised by the next
        call.
        """
        next_step = check_integer(next_step, "next_step")
        if _rank() == 0:
            self._check(next_step)  # now: when it is durable, the trainer may be in another epoch

        def done(ended: Future[object]) -> None:
            if ended.cancelled() or ended.exception() is not None:
                return
            try:
                self._add(next_step)
            except Exception as error:  # noqa: BLE001 - a future swallows it
                _log.warning("checkpoint not recorded: %s", error)
                with suppress(StepfsError):  # no loop could be started
                    self._running().parts.errors.append(error)

        future.add_done_callback(done)

    def dropped(self, next_step: int) -> None:
        """Record that the checkpoint that resumed at `next_step` was deleted."""
        self._add(next_step, drop=True)

    def _add(self, next_step: int, **fate: bool) -> None:
        """`fate`: as `record_checkpoint` takes it; saved by default."""
        next_step = check_integer(next_step, "next_step")
        if next_step < 0:
            raise UsageError(f"next_step is {next_step}: steps count from 0")
        if _rank() != 0:
            return
        if self._pace and fate:
            raise UsageError("a pace is no checkpoint: resumed and dropped belong to the hook that records these")
        if self._pace:
            fate = {"pace": True}
        record, loop = _Record(next_step, fate, self._committed, self._asked_s), self._running()
        errors = loop.call(lambda: loop.parts.add(record))
        if isinstance(record.error, StoreUnreachableError):
            _log.warning("checkpoint %d is recorded when the store answers: %s", next_step, record.error)
        elif record.error is not None:
            errors.append(record.error)
        for other in errors[1:]:
            _log.warning("checkpoint not recorded: %s", other)
        if errors:
            raise errors[0]

    def _check(self, next_step: int) -> None:
        """Refuse a checkpoint in the middle of a shuffled epoch that releases steps of this epoch."""
        if self._reads is not None:
            for sampler in list(self._reads.samplers):
                if sampler.refuses(next_step):
                    raise RefusedError(breaks_order(next_step, sampler.next_step))
            with suppress(StepfsError):  # closed
                self._committed = self._reads.next_step
        if self._mounted is not None:
            try:
                self._committed, self._asked_s = check_on_mount(next_step, self._mounted), time.monotonic()
            except (RefusedError, OtherHistoryError):
                raise
            except StepfsError as error:
                _log.info("%s cannot be asked for the order of steps: %s", self._mounted, error)

    def _running(self) -> BackgroundLoop[_Recorder]:
        """The loop of this process, started when there is none: it keeps the lake open from one record to the next."""
        with self._starting:
            if self._loop is None or not self._loop.is_here:
                recorder = partial(
                    _Recorder, self._lake, self._endpoint_url, self._group, self._keep, self._reads, self._mounted
                )
                self._loop = BackgroundLoop(
                    lambda: _recording(recorder()), name="stepfs-checkpoints", closed="the interpreter ends"
                )
                weakref.finalize(self, self._loop.stop, join_s=0).atexit = False  # `background` ends all loops at exit
            return self._loop


@dataclass(eq=False)
class _Record:
    """What the trainer says of one checkpoint."""

    next_step: int
    fate: dict[str, bool]
    known: int  # steps that are surely committed
    asked_s: float  # when the mount was asked
    tried: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None  # of the last try


@dataclass(eq=False)
class _Recorder:
    """Makes the records, in order, and keeps the lake open. Its log is read only where nobody knows that a step is
    committed.
    """

    url: str
    endpoint_url: str | None
    group: str
    keep: int | None
    reads: Lake | None  # the trainer's own
    mounted: Path | None = None
    errors: list[Exception] = field(default_factory=list)  # of records that will never be made, for a caller to hear

    def __post_init__(self) -> None:
        self._pending: list[_Record] = []
        self._added = trio.Event()
        self._store: Store | None = None
        self._control: Control | None = None
        self._log: LogReader | None = None

    async def add(self, record: _Record) -> list[Exception]:
        """Have it recorded, and wait a moment for that. Returns the errors of earlier ones, which it has not yet told."""
        self._pending.append(record)
        self._added.set()
        with trio.move_on_after(_PATIENCE_S):
            await record.tried.wait()
        if not record.tried.is_set():
            record.error = StoreUnreachableError(f"it has not answered for {_PATIENCE_S:g} s")
        errors, self.errors = self.errors, []
        return errors

    async def run(self) -> None:
        """What no store took is tried again after a while, also if nobody calls: the trainer may wait for steps that
        producers hold back for these very checkpoints.
        """
        while True:
            try:
                await self._record()
            except Exception as error:  # noqa: BLE001 - the callers get it
                for record in self._pending:
                    record.error = error
                    record.tried.set()
            with trio.move_on_after(_AGAIN_S if self._pending else math.inf):
                await self._added.wait()
            self._added = trio.Event()

    async def end(self) -> None:
        """The process ends: try once more, and say what is not recorded."""
        with trio.move_on_after(_PATIENCE_S), suppress(StoreUnreachableError):
            await self._record()
        for one in self._pending:
            text = "checkpoint %d is not recorded: record it with `stepfs checkpoint`, or by `resumed` in the next run"
            _log.warning(text, one.next_step)
        if self._store is not None:
            await self._store.aclose()

    async def _opened(self) -> Control:
        if self._store is None:
            self._store = open_store(self.url, endpoint_url=self.endpoint_url)
        if self._control is None:
            self._control = Control(self._store, await open_lake(self._store))
        else:
            await check_identity(self._store, self._control.identity)  # this one was opened long ago
        return self._control

    async def _record(self) -> None:
        """One that cannot be made is left out: it must not take others with it."""
        while self._pending:
            one = self._pending[0]
            paces = "pace" in one.fate and self._control is not None
            control = self._control if paces else await self._opened()
            assert control is not None
            try:
                if not paces:  # it releases nothing, and comes after each step
                    await self._check_history(control)
                committed = await self.committed(control, one.next_step, await self._known(one))
                await record_checkpoint(control, committed, self.group, one.next_step, keep=self.keep, **one.fate)
            except StoreUnreachableError:
                raise
            except Exception as error:  # noqa: BLE001 - raised once the others are recorded
                if not ("drop" in one.fate and isinstance(error, AbsentError)):
                    self.errors.append(error)
                if self.mounted is not None and one.error is not None:
                    self._control = self._log = None  # what was sent of it, without an answer, must not be sent again
            del self._pending[0]
            one.error = None
            one.tried.set()

    async def _check_history(self, control: Control) -> None:
        """`OtherHistoryError` unless the log has what it had here, or what the trainer's own reader knows of it."""
        known = None if self.reads is None else self.reads.known
        log = self._log if known is None else LogReader(control.store, control.identity, control, known)
        if log is not None:
            await log.check_history()

    async def _known(self, one: _Record) -> int:
        """The number of steps that are surely committed. If the mount said so long ago, the store may have been put back
        meanwhile: `OtherHistoryError` if it says by now that the lake has lost what was saved; 0 if it may not know yet.
        """
        if self.mounted is None or "drop" in one.fate or time.monotonic() - one.asked_s <= _BELIEVED_S:
            return one.known
        if one.fate and "pace" not in one.fate:  # whoever resumes begins anew, with what there is
            return 0
        try:
            known = await trio.to_thread.run_sync(check_on_mount, 0, self.mounted, abandon_on_cancel=True)
        except OtherHistoryError:
            raise
        except StepfsError as error:
            _log.info("%s cannot be asked for the lake's history: %s", self.mounted, error)
            return 0
        return 0 if one.error is not None else known

    async def committed(self, control: Control, next_step: int, known: int) -> int:
        """The number of committed steps, `known` if that is enough for this step."""
        if next_step <= known:
            return known
        if self._log is None:
            self._log = await LogReader.open(control.store, control.identity, control=control)
        for _ in range(_LOOKS_MAX):  # else producers that commit faster than this looks would hold the trainer
            if next_step <= self._log.state.next_step:
                break
            await self._log.refresh()
            await self._log.confirm()
        return self._log.state.next_step


@asynccontextmanager
async def _recording(recorder: _Recorder) -> AsyncIterator[_Recorder]:
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recorder.run)
            yield recorder
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await recorder.end()


def _rank() -> int:
    """This process's rank in the training job; 0 when there is no job."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "0"))
