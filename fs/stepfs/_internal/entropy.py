"""Randomness behind one interface, so that a simulated cluster replays from its seed.

Ids and jitter come from the operating system unless a simulation installs a seeded generator for its tasks
(trio tasks inherit context variables). Object names and incarnation ids need to be unpredictable between
processes, not secret from an attacker who can already write to the bucket.
"""

import random
from contextvars import ContextVar
from typing import Final

_SYSTEM: Final = random.SystemRandom()
_source: ContextVar[random.Random] = ContextVar("stepfs_entropy", default=_SYSTEM)


def seed(value: int) -> None:
    """Make this context, and every task started from it, draw from a seeded generator (simulations only)."""
    _source.set(random.Random(value))  # noqa: S311 - the point is to be predictable


def token(size: int) -> bytes:
    return _source.get().randbytes(size)


def uniform(low: float, high: float) -> float:
    return _source.get().uniform(low, high)
