"""The options of one `Lake`: the words of `stepfs mount` as Python values, checked and frozen.

Only these travel to another process: they contain no credentials, which come from the environment there as here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, get_type_hints

from stepfs._internal.limits import MEMORY_BYTES_MIN, default_memory_bytes, local_ranks, read_memory
from stepfs.data.fetch import CONNECTIONS_MAX
from stepfs.errors import UsageError, WrongTypeError
from stepfs.format.arguments import INTERVAL_S_MIN, check_integer, check_text, parse_duration, parse_size
from stepfs.format.grid import Grid
from stepfs.store.api import StoreOptions
from stepfs.view.inodes import STEP_MAX
from stepfs.view.names import RANK_MAX
from stepfs.view.ranks import RankMap, as_keyword, parse_ranks, parse_steps, rank_map

DEADLINE_S: Final = 300.0
_CONNECTIONS_MIN: Final = 8  # of one worker among many


def _seconds(
    word: str, advice: str = "seconds", enough: Callable[[float], bool] = lambda seconds: seconds >= 0
) -> Callable[[str | float], float]:
    def checked(value: str | float) -> float:
        try:
            seconds = parse_duration(value) if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            raise WrongTypeError(f"{word} is {value!r}, a {type(value).__name__}; give seconds") from None
        if not enough(seconds):
            raise UsageError(f"{word} is {value!r}; give {advice}")
        return seconds

    return checked


_poll = _seconds("poll", "at least 1ms", lambda seconds: seconds >= INTERVAL_S_MIN)
_deadline = _seconds("deadline", "seconds above 0", lambda seconds: seconds > 0)


def _text(word: str, example: str) -> Callable[[object], str]:
    return lambda value: check_text(value, word, example)


def _world(value: int) -> int:
    return check_integer(value, "world")


def _prefetch(value: int) -> int:
    if check_integer(value, "prefetch") < 0:
        raise UsageError(f"prefetch is {value}; give 0 for none, or leave it out")
    return value


def _ranks(value: str | int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(value, str):
        return parse_ranks(value)
    if isinstance(value, bytes | bytearray | memoryview):
        raise WrongTypeError(f"ranks is a {type(value).__name__}; give numbers, or text such as '0-7'")
    listed = value if isinstance(value, Iterable) else (value,)
    ranks = sorted({check_integer(rank, "ranks") for rank in listed})
    if ranks and not 0 <= ranks[0] <= ranks[-1] <= RANK_MAX:
        raise UsageError(f"ranks are {ranks}; give numbers from 0 to {RANK_MAX}")
    return tuple(ranks)


def _steps(value: str | range) -> range:
    steps = parse_steps(value) if isinstance(value, str) else value
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop <= STEP_MAX + 1:
        raise UsageError(f"steps is {value!r}: give 'A:B' or range(A, B) with A < B")
    return steps


def _memory(value: str | int) -> int:
    size = parse_size(value) if isinstance(value, str) else check_integer(value, "memory")
    if size < MEMORY_BYTES_MIN:
        raise UsageError(f"memory of {size} bytes: give at least {MEMORY_BYTES_MIN >> 20}M")
    return size


def _files(value: Iterable[str]) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    return tuple(check_text(name, "files", "pixels") for name in listed)


@dataclass(frozen=True, slots=True)
class Param:
    """The word of `Lake(url, word=…)` for a field, and the check that makes the field's value of it."""

    name: str
    checked: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class LakeOptions:
    """Every option of a `Lake`. Sizes in bytes, times in seconds, steps half-open."""

    url: Annotated[str, Param("lake", _text("the lake", "file:///directory"))]
    endpoint_url: Annotated[str | None, Param("endpoint_url", str)] = None
    # Of this process: a hint for prefetching, hides nothing.
    ranks: Annotated[tuple[int, ...], Param("ranks", _ranks)] = ()
    world: Annotated[int | None, Param("world", _world)] = None
    mesh: Annotated[str | None, Param("mesh", _text("mesh", "dp=4,tp=2"))] = None
    files: Annotated[tuple[str, ...] | None, Param("files", _files)] = None  # beside the rank's; None: all
    steps: Annotated[range | None, Param("steps", _steps)] = None
    wait_s: Annotated[float | None, Param("wait", _seconds("wait"))] = None
    group: Annotated[str | None, Param("group", _text("group", "pretrain"))] = None
    memory_bytes: Annotated[int | None, Param("memory", _memory)] = None
    near: Annotated[str | None, Param("near", _text("near", "file:///directory"))] = None
    prefetch_steps: Annotated[int | None, Param("prefetch", _prefetch)] = None
    poll_s: Annotated[float, Param("poll", _poll)] = 0.1
    deadline_s: Annotated[float, Param("deadline", _deadline)] = DEADLINE_S
    splits: bool = False  # the caller takes a part of a file that holds several micro-batches
    workers: int | None = None  # this process is one of so many of a loader; None: it reads for itself

    @classmethod
    def of(cls, url: str, words: Mapping[str, Any]) -> LakeOptions:
        """The options that the words of `Lake` give; None leaves the default. `UsageError` as `stepfs mount` refuses."""
        every = dict(words)
        for word in ("endpoint_url", "near"):
            every[word] = words.get(word) or os.environ.get(f"STEPFS_{word.upper()}") or None
        given = {"lake": url} | {word: value for word, value in every.items() if value is not None}
        return cls(
            **{
                field: word.checked(given[word.name])
                for field, hint in get_type_hints(cls, include_extras=True).items()
                for word in getattr(hint, "__metadata__", ())
                if word.name in given
            }
        )

    def ranks_of(self, grid: Grid) -> RankMap:
        """Which files each rank reads of a lake. `UsageError` if its grid cannot serve these options."""
        return rank_map(grid, world=self.world, mesh=self.mesh, splits=self.splits, style=as_keyword)

    def files_of(self, grid: Grid) -> tuple[int, ...]:
        """The numbers of the files that are read of each micro-batch. `UsageError` for a name that the lake does not have."""
        beside = [name for name in grid.files if name]
        for name in self.files or ():
            if name not in beside:
                has = f"has {', '.join(beside)} beside them" if beside else "has none"
                raise UsageError(f"files names {name!r}: beside its ranks' files this lake {has}")
        return tuple(
            number for number, name in enumerate(grid.files) if not name or self.files is None or name in self.files
        )

    @property
    def is_worker(self) -> bool:
        """Whether siblings read the other steps: this process fetches only announced steps ahead."""
        return self.workers is not None

    @property
    def store_options(self) -> StoreOptions:
        """How the stores are reached, with this process's part of the connections."""
        return StoreOptions(self.endpoint_url, max(_CONNECTIONS_MIN, CONNECTIONS_MAX // (self.workers or 1)))

    @property
    def memory_share(self) -> int:
        """Bytes for this process: its part of what was given to it, or of the machine's that its ranks share."""
        whole = self.memory_bytes or default_memory_bytes(read_memory()) // local_ranks()
        return max(MEMORY_BYTES_MIN, whole // (self.workers or 1))

    def of_worker(self, workers: int) -> LakeOptions:
        """The same for one of `workers` processes, which together keep to one budget."""
        return replace(self, workers=workers)
