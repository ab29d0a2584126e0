"""Pure functions of stepfs that every simulated process calls with the same arguments answer from memory.

A dozen processes read the same commits, snapshots and records again and again, and what they read is immutable: the
same bytes under the same name decode to the same value. Runs that begin with the same lake share what is remembered.
The ledger and the audit keep the real functions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from stepfs.format import commit, control, keys, snapshot
from stepfs.store import api

_PURE: Final[tuple[Callable[..., Any], ...]] = (
    commit.decode_commit, control.decode_control, snapshot.decode_segment, snapshot.decode_snapshot, keys.number_of,
    keys.numbered, api.check_key, api.check_prefix,
)  # fmt: skip


@functools.cache
def _places() -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    """Where the real functions are known: (module of stepfs, name, function)."""
    return tuple(
        (room, real.__name__, real)
        for name, room in list(sys.modules.items())
        if name.startswith("stepfs")
        for real in _PURE
        if vars(room).get(real.__name__) is real
    )


_remembered: Final = {real: functools.lru_cache(maxsize=1 << 14)(real) for real in _PURE}


@contextmanager
def decoded_once() -> Iterator[None]:
    """Within, each distinct call is carried out once; an error every time. What a test has replaced stays replaced."""
    places = [place for place in _places() if vars(place[0]).get(place[1]) is place[2]]
    for room, name, real in places:
        setattr(room, name, _remembered[real])
    try:
        yield
    finally:
        for room, name, real in places:
            setattr(room, name, real)
