"""How much memory a run uses: the least it needs, and what it may hold ahead of the planner.

Least: the largest block of every source and a group of it, and the steps under way. Samples held ahead and pending
uploads share what lies above.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from stepfs.errors import UsageError
from stepfs_producer.plan.rules import Rules
from stepfs_producer.run.building import STEPS_PER_WORKER
from stepfs_producer.run.loading import LoadedSource

_SHARE_OF_MACHINE: Final = 4
_PENDING_MIN: Final = 64 << 20
_PENDING_MAX: Final = 512 << 20
_TOKEN_BYTES: Final = 28  # of a step's task and its payloads: ids twice, labels, positions, documents
_GROUP_SHARE: Final = 4  # a group is at most a quarter of its block


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a run may use for each purpose."""

    least: int
    held_bytes: int
    pending_bytes: int


def step_bytes(rules: Rules) -> int:
    """Bytes of a step under way."""
    return rules.ranks * rules.micro_batches * rules.micro_batch_tokens * _TOKEN_BYTES


def least_bytes(rules: Rules, sources: tuple[LoadedSource, ...], workers: int) -> int:
    """Below this a run cannot go on."""
    blocks = sum(source.layout.largest_block_bytes for source in sources)
    steps = STEPS_PER_WORKER * workers * step_bytes(rules)
    return blocks + blocks // _GROUP_SHARE + steps


def memory_of(given: int | None, rules: Rules, sources: tuple[LoadedSource, ...], workers: int) -> Memory:
    """`given`: bytes, None for a quarter of the machine's. `UsageError` below the least."""
    least = least_bytes(rules, sources, workers)
    total = given or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE_OF_MACHINE
    pending = max(min(_PENDING_MAX, total // 4), _PENDING_MIN, step_bytes(rules))
    if total < least + pending:
        raise UsageError(
            f"the run needs {_mib(least + pending)} MiB: the largest block of each of {len(sources)} sources, and "
            f"{STEPS_PER_WORKER * workers} steps under way; it may use {_mib(total)} MiB. Give more with --memory, or use "
            "fewer --workers, smaller blocks (shuffle: {block: 1MiB}) or smaller steps"
        )
    return Memory(least, total - least - pending, pending)


def _mib(count: int) -> int:
    return -(-count // (1 << 20))
