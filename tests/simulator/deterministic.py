"""One process, one thread, virtual time, seeded scheduling: a run is a function of its seed.

trio batches runnable tasks and shuffles each batch. With the switch that it ships for Hypothesis a batch is first
sorted by task age and the shuffle comes from a generator that can be seeded (trio/_core/_run.py,
`_hypothesis_plugin_setup`), so the interleaving is arbitrary *and* repeatable. `MockClock` jumps to the next deadline
whenever everybody waits, so fifteen-second timeouts cost nothing.

trio's own loop costs more than what runs in it, so the passes are made by `virtual_loop`, in the same order.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio
from trio.testing import MockClock
from virtual_loop import virtual_loop

from stepfs._internal import entropy

T = TypeVar("T")
_run_loop: Any = sys.modules["trio._core._run"]


def run_seeded(main: Callable[..., Awaitable[T]], *arguments: object, seed: int) -> T:
    """`trio.run(main, *arguments)` in virtual time, with every random decision drawn from `seed`."""
    before = _run_loop._ALLOW_DETERMINISTIC_SCHEDULING, _run_loop._r.getstate()
    _run_loop._ALLOW_DETERMINISTIC_SCHEDULING = True
    _run_loop._r.seed(seed)

    def start() -> T:
        entropy.seed(seed)
        clock: Any = MockClock(autojump_threshold=0)
        clock.current_time = lambda: clock._virtual_base  # what it comes to at rate 0
        with virtual_loop():
            return trio.run(main, *arguments, clock=clock)

    try:
        return contextvars.copy_context().run(start)
    finally:
        _run_loop._ALLOW_DETERMINISTIC_SCHEDULING = before[0]
        _run_loop._r.setstate(before[1])


@functools.cache
def _rooms(name: str, modules: int) -> tuple[Any, ...]:
    """The modules of stepfs with this name, while so many modules are loaded."""
    assert len(sys.modules) == modules
    return tuple(m for n, m in list(sys.modules.items()) if n.startswith("stepfs") and hasattr(m, name))


@contextmanager
def scaled(**sizes: Any) -> Iterator[None]:
    """Constants of stepfs made small (SEGMENT_STEPS=4, …), so that a short run crosses every boundary often.

    A name is changed wherever it was imported to; one that no stepfs module has is a mistake of the caller.
    """
    changed: list[tuple[Any, str, Any]] = []
    for name, value in sizes.items():
        rooms = _rooms(name, len(sys.modules))
        assert rooms, f"no stepfs module has a constant {name}"
        for room in rooms:
            changed.append((room, name, getattr(room, name)))
            setattr(room, name, value)
    try:
        yield
    finally:
        for room, name, value in changed:
            setattr(room, name, value)
