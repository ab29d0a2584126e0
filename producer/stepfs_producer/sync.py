"""The same producer for code that is not async: trio runs in a thread of its own and executes the calls.

The thread is a daemon: a process that ends without leaving the `with` block loses unflushed appends, as in a crash,
and does not hang. Ctrl-C interrupts the caller's wait, never the thread; leaving the block by KeyboardInterrupt
abandons pending appends like any exception. After a fork the thread does not exist any more, so every call checks the
pid first (hazard 8).
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import trio

from stepfs.errors import RefusedError, UsageError
from stepfs.format.records import LakeIdentity
from stepfs_producer.commit_loop import CommitStats
from stepfs_producer.pace import Pacing
from stepfs_producer.producer import AsyncProducer
from stepfs_producer.tgb_writer import Payload

_T = TypeVar("_T")
_P = ParamSpec("_P")


def _takes_what(
    model: Callable[Concatenate[Any, _P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Producer, _P], None]]:
    """The decorated `__init__` has the parameters of `model`, for type checkers and for help()."""

    def adopt(init: Callable[..., None]) -> Callable[Concatenate[Producer, _P], None]:
        init.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
        return init

    return adopt


class Producer:
    """`AsyncProducer` with blocking calls; arguments, results and errors are the same.

    May be used from several threads of one process; appends get their seqs in the order in which the thread takes
    them.
    """

    @_takes_what(AsyncProducer.__init__)
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._async = AsyncProducer(*arguments, **settings)
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._leave: trio.Event | None = None
        self._left = False
        self._leaving_by: BaseException | None = None
        self._ended: Future[None] = Future()

    def __enter__(self) -> Self:
        self._refuse_fork()
        if self._thread is not None:
            raise UsageError("a producer runs once; make a new one")
        entered: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(entered,), name=f"stepfs-producer-{self._async.producer_id}", daemon=True
        )
        self._thread.start()
        try:
            entered.result()
        except BaseException as error:
            self._let_go(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        if os.getpid() != self._pid:
            if error is None:
                self._refuse_fork()
            return
        try:
            if error is None:
                self.flush()
        except BaseException as flush_error:
            self._let_go(flush_error)
            self._join(raising=False)
            raise
        self._let_go(error)
        self._join(raising=error is None)

    def append(
        self, batch: Sequence[Payload], *, position: object, records: Sequence[int] | None = None
    ) -> int:
        """Append one global step; see `AsyncProducer.append`. Blocks only while too much is pending."""

        async def append() -> int:
            return await self._async.append(batch, position=position, records=records)

        return self._call(append)

    def flush(self) -> None:
        """Return when everything appended before the call is durable, committed and visible to readers."""
        self._call(self._async.flush)

    def retire(self) -> None:
        """Flush, then commit the retirement; see `AsyncProducer.retire`."""
        self._call(self._async.retire)

    @property
    def position(self) -> object:
        """The position of the newest committed batch of this id; None before the first."""
        self._refuse_fork()
        return self._async.position

    @property
    def next_seq(self) -> int:
        """The seq of the next append."""
        self._refuse_fork()
        return self._async.next_seq

    @property
    def committed_seq(self) -> int:
        """Batches of this id below this seq are committed."""
        self._refuse_fork()
        return self._async.committed_seq

    @property
    def lake(self) -> LakeIdentity:
        """The lake's identity: slices per batch, file extension."""
        self._refuse_fork()
        return self._async.lake

    @property
    def epoch(self) -> int:
        """This incarnation's epoch."""
        self._refuse_fork()
        return self._async.epoch

    @property
    def tally(self) -> CommitStats:
        """The attempts of this incarnation so far, and their results."""
        self._refuse_fork()
        return self._async.tally

    @property
    def pacing(self) -> Pacing:
        """The present interval of this producer's commits; see `AsyncProducer.pacing`."""
        self._refuse_fork()
        return self._async.pacing

    def _run(self, entered: Future[None]) -> None:
        try:
            trio.run(self._main, entered)
        except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
            if not entered.done():
                entered.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _main(self, entered: Future[None]) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._leave = trio.Event()
        if self._left:  # interrupted before the token existed
            return
        await self._async.__aenter__()
        entered.set_result(None)
        await self._leave.wait()
        error = self._leaving_by
        await self._async.__aexit__(type(error) if error else None, error, None)

    def _call(self, work: Callable[[], Awaitable[_T]]) -> _T:
        self._refuse_fork()
        if self._token is None:
            raise UsageError("the producer has not been started; use it as `with Producer(…) as producer:`")
        if self._ended.done():
            raise UsageError(f"producer {self._async.producer_id!r} is closed; make a new one")
        try:
            return trio.from_thread.run(work, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise UsageError(f"producer {self._async.producer_id!r} was closed by another thread") from None

    def _let_go(self, error: BaseException | None) -> None:
        """Make the thread leave, with this exception if there is one."""
        self._leaving_by = error
        self._left = True
        token, leave = self._token, self._leave
        if token is not None and leave is not None and not self._ended.done():
            try:
                token.run_sync_soon(leave.set)
            except trio.RunFinishedError:
                return

    def _join(self, *, raising: bool) -> None:
        assert self._thread is not None
        self._thread.join()
        if raising:
            self._ended.result()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._pid:
            raise RefusedError(
                f"producer {self._async.producer_id!r} belongs to process {self._pid}; after a fork, make a Producer of "
                "its own, with an id of its own, in the child"
            )
