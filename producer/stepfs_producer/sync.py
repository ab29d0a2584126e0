"""The same producer for code that is not async: it runs in a background loop, as a `Lake` does (`stepfs.background`).

A process that ends without leaving the `with` block loses unflushed appends, as in a crash, and does not hang. Ctrl-C
takes the call back: an append that still waited was not appended. Leaving the block by KeyboardInterrupt abandons
pending appends like any exception. A child of a fork is refused: two processes would append as one (hazard 8).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from stepfs.background import BackgroundLoop, generation
from stepfs.errors import RefusedError, UsageError
from stepfs_producer.producer import AsyncProducer, Readings, Running
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


class Producer(Readings):
    """`AsyncProducer` with blocking calls; arguments, results and errors are the same.

    May be used from several threads of one process; appends get their seqs in the order in which the thread takes
    them.
    """

    @_takes_what(AsyncProducer.__init__)
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._made = AsyncProducer(*arguments, **settings)
        self._made_by = os.getpid(), generation()
        self._loop: BackgroundLoop[AsyncProducer] | None = None

    def __enter__(self) -> Self:
        producer_id = self._async.producer_id
        if self._loop is not None:
            raise UsageError("a producer runs once; make a new one")
        self._loop = BackgroundLoop(
            lambda: self._async,
            name=f"stepfs-producer-{producer_id}",
            closed=f"producer {producer_id!r} is closed; make a new one",
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del kind, traceback
        assert self._loop is not None
        try:
            if error is None:
                self._call(self._async.finish)
        finally:
            self._loop.stop()

    def append(self, batch: Sequence[Payload], *, position: object, records: Sequence[int] | None = None) -> int:
        """Append one global step; see `AsyncProducer.append`. Blocks only while too much is pending.

        Ctrl-C ends the wait. `next_seq` then tells whether the batch was appended nevertheless, at the last moment.
        """
        return self._call(partial(self._async.append, batch, position=position, records=records))

    def flush(self) -> None:
        """Return when everything appended before the call is durable, committed and visible to readers."""
        self._call(self._async.flush)

    def retire(self) -> None:
        """Flush, then commit the retirement; see `AsyncProducer.retire`."""
        self._call(self._async.retire)

    def _call(self, work: Callable[[], Awaitable[_T]]) -> _T:
        if self._loop is None:
            raise UsageError("the producer has not been started; use it as `with Producer(…) as producer:`")
        return self._loop.call(work)

    @property
    def _async(self) -> AsyncProducer:
        """The producer, unless this is a child of a fork."""
        pid, made_in = self._made_by
        if made_in != generation():
            raise RefusedError(
                f"producer {self._made.producer_id!r} belongs to process {pid}; after a fork, make a Producer of its own, "
                "with an id of its own, in the child"
            )
        return self._made

    @property
    def running(self) -> Running:
        """See `AsyncProducer.running`."""
        return self._async.running
