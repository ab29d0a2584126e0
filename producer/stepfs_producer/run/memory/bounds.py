"""How much memory a run uses: the least it needs, and how much it may hold ahead of the planner.

Least: the largest block of every source and a group of it, the tokens of the steps under way, and room for pending
payloads. Samples held ahead and more pending payloads share the rest. Rows of columns are bounded by both as soon as they
are known: held ahead as measured, of steps under way as planned (`run/memory/step_room.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stepfs.errors import UsageError
from stepfs_producer.plan.rules import Rules
from stepfs_producer.run.source_loader import LoadedSource
from stepfs_producer.run.step_builder import STEPS_PER_WORKER

_SHARE_OF_MACHINE: Final = 4
_PENDING_MIN: Final = 64 << 20
_PENDING_MAX: Final = 512 << 20
_TOKEN_BYTES: Final = 28  # of a step's task and its payloads: ids twice, labels, positions, documents
_GROUP_SHARE: Final = 4  # a group is at most a quarter of its block


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


def memory_of(given: int | None, rules: Rules, sources: tuple[LoadedSource, ...], workers: int) -> Memory:
    """`given`: bytes, None for a quarter of the machine's. `UsageError` below the least."""
    step_tokens = rules.step_tokens
    least = least_bytes((source.layout.largest_block_bytes for source in sources), step_tokens, workers)
    total = given or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MACHINE
    if total < least:
        raise UsageError(
            f"the run needs {_mib(least)} MiB: the largest block of each of {len(sources)} sources, and "
            f"{STEPS_PER_WORKER * workers} steps under way; it may use {_mib(total)} MiB. Give more with --memory, or use "
            "fewer --workers, smaller blocks (shuffle: {block: 1MiB}) or smaller steps"
        )
    pending_min = _pending_min(step_tokens)
    free = total - least + pending_min
    # Rows of columns may be a hundred times the tokens.
    most = total // 2 if rules.columns else min(_PENDING_MAX, total // 4)
    pending = min(max(pending_min, most), free)
    return Memory(least, total, free - pending, pending)


def _pending_min(step_tokens: int) -> int:
    return max(_PENDING_MIN, step_tokens * _TOKEN_BYTES)


def _mib(count: int) -> int:
    return -(-count // (1 << 20))
