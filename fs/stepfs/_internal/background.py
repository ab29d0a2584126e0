"""A trio loop in a thread of its own, and calls into it from any other thread: below `Lake` and `Producer`.

A loop belongs to a *generation* of the process: a child of a fork is in another one, finds `is_here` false, leaves the
dead loop alone and starts its own, or refuses. Ctrl-C in a waiting main thread cancels the call, and raises once it ended.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final, Generic, TypeVar, cast

import trio

from stepfs.errors import ClosedError, StepfsError

T = TypeVar("T")
P = TypeVar("P")

_END_S: Final = 8.0  # at the end of the interpreter, for the last records of a group
_TAKEN_BACK_S: Final = 2.0  # for a call that Ctrl-C takes back; it may be in a thread of the store
_LOOK_S: Final = 1.0  # a signal that comes just before a wait does not end it (CPython): look so often
_generation = 0
_alive: set[BackgroundLoop[object]] = set()
_of_parents: list[object] = []  # never finalized here


def generation() -> int:
    """How many forks lie between this process and the one that imported this module."""
    return _generation


def _wait(lock: threading.Lock) -> None:
    """Wait until it is released; a signal's handler runs within a second, whenever the signal comes."""
    while not lock.acquire(timeout=_LOOK_S):
        pass


class _Call(Generic[T]):
    """One coroutine that a thread waits for."""

    def __init__(self, run: Callable[[], Awaitable[T]]) -> None:
        self._run = run
        self._scope = trio.CancelScope()
        self._done = threading.Lock()
        self._done.acquire()
        self._outcome: tuple[T] | BaseException | None = None
        self._has_ended = False

    def result(self) -> T:
        """Wait for it; KeyboardInterrupt comes through."""
        _wait(self._done)
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            if isinstance(outcome, StepfsError):  # its line says all: the frames of this thread would bury it
                outcome = outcome.with_traceback(None)
            try:
                raise outcome
            finally:
                del outcome
                self._outcome = None  # a cycle: error → traceback → frame → call
        assert outcome is not None
        return outcome[0]

    async def run(self) -> None:
        try:
            with self._scope:
                self.end((await self._run(),))
            self.end(ClosedError("taken back"))  # no caller waits for its outcome, unless it has one
        except Exception as error:  # noqa: BLE001 - the waiting thread gets it
            self.end(error)

    def cancel(self) -> None:
        self._scope.cancel()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, for so long at most."""
        if not self._has_ended:
            self._done.acquire(timeout=seconds)

    def end(self, outcome: tuple[T] | BaseException) -> None:
        """Wake the thread, once."""
        if not self._has_ended:
            self._has_ended, self._outcome = True, outcome
            self._done.release()


class BackgroundLoop(Generic[P]):
    """Runs `open_parts()` as a context in its loop until `stop`; `parts` is its value."""

    def __init__(
        self,
        open_parts: Callable[[], AbstractAsyncContextManager[P]],
        *,
        name: str,
        closed: str,
        owner: int | None = None,
    ) -> None:
        """Start, and return once the parts are open. Raises the error of opening. `name`: the thread's. `closed`: the
        message of calls after the end. `owner`: a process; once it has ended, the loop ends, and every call raises
        `ClosedError`.
        """
        self.generation = _generation
        self._owner, self._closed = owner, closed
        self._open_parts = open_parts
        self._opened = threading.Lock()
        self._opened.acquire()
        self._parts: P | None = None
        self._was_open = False
        self._failure: BaseException | None = None
        self._stopping = False
        self._ended = False
        self._calls: set[_Call[object]] = set()
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        _alive.add(cast("BackgroundLoop[object]", self))  # first: a loop that cannot open ends at once
        try:
            self._thread.start()
            _wait(self._opened)
        except BaseException:  # Ctrl-C while the store is silent, or no thread to be had
            self._stopping = True
            if self._thread.ident is None:
                _alive.discard(cast("BackgroundLoop[object]", self))
            else:
                self.stop(join_s=0)
            raise
        if not self._was_open:
            self._thread.join()
            raise self._reason()

    @property
    def parts(self) -> P:
        """The value of `open_parts`. Only calls may use it, but for what it allows to other threads."""
        parts = self._parts
        if parts is None:
            raise self._reason()
        return parts

    @property
    def is_here(self) -> bool:
        """Whether the loop runs in this process: not in the child of a fork."""
        return self.generation == _generation

    def call(self, run: Callable[[], Awaitable[T]]) -> T:
        """The result of a coroutine that runs in the loop. `ClosedError` when the loop was stopped."""
        call: _Call[T] = _Call(run)
        try:
            self._submit(lambda: self._start(cast("_Call[object]", call)))
            return call.result()
        except BaseException:
            with suppress(StepfsError):
                self._submit(call.cancel)  # Ctrl-C; without effect on a call that has ended
                call.wait(_TAKEN_BACK_S)
            raise

    def stop(self, *, join_s: float | None = None) -> None:
        """End the loop: calls under way raise `ClosedError`. Waits `join_s` seconds for the thread, or as long as it
        takes. Idempotent; any thread may call it.
        """
        if not self.is_here:
            return
        self._stopping = True
        with suppress(StepfsError):
            self._submit(self._scope.cancel)
        if threading.current_thread() is not self._thread:  # the collector may run anywhere
            if join_s is not None:
                self._thread.join(join_s)
            while join_s is None and self._thread.is_alive():
                self._thread.join(_LOOK_S)

    def _submit(self, run: Callable[[], None]) -> None:
        token = self._token
        if token is None or self._ended:
            raise self._reason()
        try:
            token.run_sync_soon(run)
        except trio.RunFinishedError:
            raise self._reason() from None

    def _reason(self) -> StepfsError:
        failure = self._failure
        while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        if isinstance(failure, StepfsError):
            return failure.with_traceback(None)
        if failure is not None:
            error = StepfsError(f"{self._thread.name} has failed for good ({failure!r}); open the lake again")
            error.__cause__ = failure
            return error
        return ClosedError(self._closed)

    def _start(self, call: _Call[object]) -> None:
        if self._stopping:
            call.end(self._reason())
            return
        self._calls.add(call)  # `_main` ends those that do not end by themselves
        if self._nursery is not None:
            self._nursery.start_soon(self._run_call, call)

    async def _run_call(self, call: _Call[object]) -> None:
        try:
            await call.run()
        finally:
            if self._stopping:
                call.end(self._reason())  # at once: leaving the parts may take a while
                self._calls.discard(call)
        self._calls.discard(call)

    def _main(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: BLE001 - every caller gets it
            self._failure = error
        finally:
            self._ended = True
            reason = self._reason()
            for call in list(self._calls):
                call.end(reason)
            self._calls.clear()
            _alive.discard(cast("BackgroundLoop[object]", self))
            self._parts = None  # its memory goes with the loop
            if not self._was_open:
                self._opened.release()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        if self._stopping:
            return
        with self._scope:
            async with self._open_parts() as parts, trio.open_nursery() as nursery:
                self._nursery, self._parts, self._was_open = nursery, parts, True
                self._opened.release()
                try:
                    await _end_of(self._owner)
                finally:
                    self._nursery = None  # it is about to close


async def _end_of(owner: int | None) -> None:
    """Wait for ever, or until the process has ended: then raise `ClosedError`. For ever, too, where a sandbox has no
    pidfd_open: there a wait ends by its deadline.
    """
    if owner is None:
        await trio.sleep_forever()
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        pass
    except OSError:
        await trio.sleep_forever()
    else:
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
    raise ClosedError(f"process {owner}, for which this one reads, has ended")


def _end_all() -> None:
    """The interpreter ends: loops that were not closed end now, within a bound."""
    until = time.monotonic() + _END_S
    loops = list(_alive)
    for loop in loops:
        loop.stop(join_s=0)
    for loop in loops:
        loop.stop(join_s=max(0.0, until - time.monotonic()))


def _forked() -> None:
    """Forget all loops in the child of a fork: they are another process's."""
    global _generation, _alive  # noqa: PLW0603 - there is one process
    _generation += 1
    _of_parents.extend(_alive)
    _alive = set()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_forked)
