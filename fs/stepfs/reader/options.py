"""The options of one `Lake`: the words of `stepfs mount` as Python values, checked and frozen.

Only these travel to another process: they contain no credentials, which come from the environment there as here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from stepfs.data.fetch.concurrency import CONNECTIONS_MAX
from stepfs.data.memory.available import MEMORY_BYTES_MIN, default_memory_bytes, read_memory
from stepfs.errors import UsageError, WrongTypeError
from stepfs.format.arguments import INTERVAL_S_MIN, check_integer, check_text, parse_duration, parse_size
from stepfs.store.options import StoreOptions
from stepfs.view.naming import RANK_MAX, STEP_MAX
from stepfs.view.selection import parse_ranks, parse_steps

DEADLINE_S: Final = 300.0
_CONNECTIONS_MIN: Final = 8  # of one worker among many


@dataclass(frozen=True, slots=True)
class LakeOptions:
    """Every option of a `Lake`. Sizes in bytes, times in seconds, steps half-open."""

    url: str
    endpoint_url: str | None = None
    ranks: tuple[int, ...] = ()  # what this process reads: a hint for prefetching, hides nothing
    world: int | None = None
    mesh: str | None = None
    steps: range | None = None
    wait_s: float | None = None
    group: str | None = None
    memory_bytes: int | None = None
    prefetch_steps: int | None = None
    poll_s: float = 0.1
    deadline_s: float = DEADLINE_S
    workers: int | None = None  # this process is one of so many of a loader; None: it reads for itself

    @property
    def is_worker(self) -> bool:
        """Whether siblings read what this process does not: it fetches ahead nothing but what was announced to it."""
        return self.workers is not None

    @property
    def store_options(self) -> StoreOptions:
        """How the stores are reached, with this process's part of the connections."""
        return StoreOptions(self.endpoint_url, max(_CONNECTIONS_MIN, CONNECTIONS_MAX // (self.workers or 1)))

    @property
    def memory_share(self) -> int:
        """Bytes for this process: its part of the whole budget."""
        whole = self.memory_bytes or default_memory_bytes(read_memory())
        return max(MEMORY_BYTES_MIN, whole // (self.workers or 1))

    def of_worker(self, workers: int) -> LakeOptions:
        """The same for one of `workers` processes, which together keep to one budget."""
        return replace(self, workers=workers)


def lake_options(
    url: str,
    *,
    endpoint_url: str | None,
    ranks: str | int | Iterable[int] | None,
    world: int | None,
    mesh: str | None,
    steps: str | range | None,
    wait: str | float | None,
    group: str | None,
    memory: str | int | None,
    prefetch_steps: int | None,
    poll: str | float,
    deadline_s: float,
) -> LakeOptions:
    """`UsageError` for what `stepfs mount` would refuse."""
    if not _seconds(deadline_s, "deadline_s") > 0:
        raise UsageError(f"deadline_s is {deadline_s!r}; give seconds above 0")
    poll_s = _seconds(poll, "poll")
    if poll_s < INTERVAL_S_MIN:
        raise UsageError(f"poll is {poll!r}; give at least 1ms")
    if prefetch_steps is not None and check_integer(prefetch_steps, "prefetch_steps") < 0:
        raise UsageError(f"prefetch_steps is {prefetch_steps}; give 0 for none, or leave it out")
    return LakeOptions(
        check_text(url, "the lake", "file:///directory"),
        endpoint_url=endpoint_url or os.environ.get("STEPFS_ENDPOINT_URL"),
        ranks=_ranks(ranks),
        world=None if world is None else check_integer(world, "world"),
        mesh=None if mesh is None else check_text(mesh, "mesh", "dp=4,tp=2"),
        steps=_steps(steps),
        wait_s=None if wait is None else _seconds(wait, "wait"),
        group=None if group is None else check_text(group, "group", "pretrain"),
        memory_bytes=_memory(memory),
        prefetch_steps=prefetch_steps,
        poll_s=poll_s,
        deadline_s=_seconds(deadline_s, "deadline_s"),
    )


def _seconds(value: str | float, what: str) -> float:
    try:
        seconds = parse_duration(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        raise WrongTypeError(f"{what} is {value!r}, a {type(value).__name__}; give seconds") from None
    if not seconds >= 0:
        raise UsageError(f"{what} is {value!r}; give seconds")
    return seconds


def _ranks(value: str | int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return parse_ranks(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise WrongTypeError(f"ranks is a {type(value).__name__}; give numbers, or text such as '0-7'")
    listed = value if isinstance(value, Iterable) else (value,)
    ranks = sorted({check_integer(rank, "ranks") for rank in listed})
    if ranks and not 0 <= ranks[0] <= ranks[-1] <= RANK_MAX:
        raise UsageError(f"ranks are {ranks}; give numbers from 0 to {RANK_MAX}")
    return tuple(ranks)


def _steps(value: str | range | None) -> range | None:
    if value is None:
        return None
    steps = parse_steps(value) if isinstance(value, str) else value
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop <= STEP_MAX + 1:
        raise UsageError(f"steps is {value!r}: give 'A:B' or range(A, B) with A < B")
    return steps


def _memory(value: str | int | None) -> int | None:
    if value is None:
        return None
    size = parse_size(value) if isinstance(value, str) else check_integer(value, "memory")
    if size < MEMORY_BYTES_MIN:
        raise UsageError(f"memory of {size} bytes: give at least {MEMORY_BYTES_MIN >> 20}M")
    return size
