"""Many seeds over several processes: what CI runs by the thousand and `scripts/simulate` by the ten thousand.

Children are spawned, not forked: each has its own hash randomisation, so that a digest that agrees between two
processes is one that depends on the seed alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from cluster import simulate

_CHUNK = 10


@dataclass(frozen=True)
class Summary:
    """One seed's outcome without its trace."""

    seed: int
    broken: list[str]
    digest: str
    events: int
    virtual_s: float
    counts: Counter[str]


def summary(seed: int) -> Summary:
    """Simulate one seed."""
    outcome = simulate(seed)
    return Summary(seed, outcome.broken, outcome.digest, len(outcome.trace), outcome.virtual_s, outcome.counts)


def sweep(seeds: range, *, processes: int | None = None) -> Iterator[Summary]:
    """Simulate every seed, in order; `processes` None: one per core that this process may use."""
    context = multiprocessing.get_context("spawn")
    workers = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_quiet) as pool:
        yield from pool.map(summary, seeds, chunksize=_CHUNK)


def _quiet() -> None:
    """Warnings about planted faults are not for the terminal."""
    logging.disable(logging.CRITICAL)
