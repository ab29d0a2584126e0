"""The memory of a run: the least it needs, the bytes that it may hold ahead of the planner, and room for steps under way.

Least: the largest block of every source and a group of it, the tokens of the steps under way, and room for pending
payloads. Samples held ahead and more pending payloads share the rest.

Tokens have a known size, so the number of steps bounds them. Rows of columns have not: a step of large images may have a
hundred times as many bytes as another. So rows held ahead are bounded as measured, and a step is counted as soon as its
plan shows its rows. A step that is too large by itself is made alone, with one warning: the memory that it waits for would
never be there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs._internal.limits import read_memory
from stepfs.errors import UsageError
from stepfs_producer.plan.rules import Rules
from stepfs_producer.run.load import LoadedSource

STEPS_PER_WORKER: Final = 2  # under way
_SHARE_OF_MACHINE: Final = 4
_PENDING_MIN: Final = 64 << 20
_PENDING_MAX: Final = 512 << 20
_TOKEN_BYTES: Final = 28  # of a step's task and its payloads: ids twice, labels, positions, documents
_MODEL_TOKEN_BYTES: Final = (
    490  # of a token in the results of the library: 430 and 490 measured, of texts of 1 and 4 MiB
)
_BYTE_TOKEN_BYTES: Final = 13  # of a token that is a byte: 12 measured
PAGE_COPIES: Final = 3  # of a page of Parquet while it is read: compressed or copied, decoded, as rows
_GROUP_SHARE: Final = 4  # a group is at most a quarter of its block

_log = logging.getLogger("stepfs.producer")
COPIES: Final = 3  # of a row: in its group's body, in the arrays of a step, in its file


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a run may use for each purpose."""

    least: int
    total: int
    held_bytes: int
    pending_bytes: int


def least_bytes(largest_blocks: Iterable[int], step_tokens: int, workers: int) -> int:
    """Below this a run cannot go on. `largest_blocks`: bytes that a block of each source can reach."""
    blocks = sum(largest_blocks)
    steps = STEPS_PER_WORKER * workers * step_tokens * _TOKEN_BYTES
    return blocks + blocks // _GROUP_SHARE + steps + _pending_min(step_tokens)


def longest_text_bytes(tokens: int, *, of_model: bool) -> int:
    """More, in one worker, while it makes so many tokens of one text."""
    return tokens * (_MODEL_TOKEN_BYTES if of_model else _BYTE_TOKEN_BYTES)


def memory_of(given: int | None, rules: Rules, sources: tuple[LoadedSource, ...], workers: int) -> Memory:
    """`given`: bytes, None for a quarter of the machine's, or of the container's. `UsageError` below the least."""
    step_tokens = rules.step_tokens
    least = least_bytes((source.layout.largest_block_bytes for source in sources), step_tokens, workers)
    total = given or read_memory().limit // _SHARE_OF_MACHINE
    if total < least:
        raise UsageError(
            f"the run needs {_mib(least)} MiB: the largest block of each of {len(sources)} sources, and "
            f"{STEPS_PER_WORKER * workers} steps under way; it may use {_mib(total)} MiB. Give more with --memory, or use "
            "fewer --workers, smaller blocks (shuffle: {block: 1MiB}) or smaller steps"
        )
    pending_min = _pending_min(step_tokens)
    return _divided(rules, total, least, pending_min)


def memory_here(rules: Rules, sources: tuple[LoadedSource, ...], workers: int, of_step: float) -> Memory:
    """The memory of a run that uploads nothing, and makes the part `of_step` of each step. Nothing is refused: the least is
    brought in anyway.
    """
    total = read_memory().limit // _SHARE_OF_MACHINE
    least = least_bytes(
        (source.layout.largest_block_bytes for source in sources), int(rules.step_tokens * of_step), workers
    )
    return _divided(rules, max(total, least), least, _PENDING_MIN)


def _divided(rules: Rules, total: int, least: int, pending_min: int) -> Memory:
    free = total - least + pending_min
    # Rows of columns may be a hundred times the tokens.
    most = total // 2 if rules.columns else min(_PENDING_MAX, total // 4)
    pending = min(max(pending_min, most), free)
    return Memory(least, total, free - pending, pending)


def _pending_min(step_tokens: int) -> int:
    return max(_PENDING_MIN, step_tokens * _TOKEN_BYTES)


def _mib(count: int) -> int:
    return -(-count // (1 << 20))


class StepRoom:
    """Taken in the order of steps by one task; given back by any."""

    def __init__(self, steps: int, bytes_max: int | None = None) -> None:
        """`steps` at once; of `bytes_max` in rows and their copies, None: as many as there are."""
        self._steps = steps
        self._bytes_max = bytes_max
        self.row_bytes = 0  # of the steps under way
        self._given = trio.Event()
        self._told = False

    async def take(self, row_bytes: int) -> None:
        """Wait until one more step may be made, whose columns have so many bytes."""
        most = self._bytes_max
        if most is not None and COPIES * row_bytes > most and not self._told:
            self._told = True
            _log.warning(
                "a step has %d MiB in its columns, and takes %d times that while it is made; --memory leaves %d MiB: such"
                " steps are made one by one, and above it. Give more --memory, or make smaller steps",
                row_bytes >> 20,
                COPIES,
                most >> 20,
            )
        while not self._steps or (most is not None and self.row_bytes and COPIES * (self.row_bytes + row_bytes) > most):
            self._given = trio.Event()
            await self._given.wait()
        self._steps -= 1
        self.row_bytes += row_bytes

    def give(self, row_bytes: int) -> None:
        self._steps += 1
        self.row_bytes -= row_bytes
        self._given.set()
