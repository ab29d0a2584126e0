"""A step plan and the samples that are here → the task of a constructor, which then depends on nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stepfs_producer.payloads.step_task import NO_TOKEN, StepTask
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run.held import Group, gather


def task_of(plan: StepPlan, groups: Mapping[str, tuple[Group, ...]]) -> StepTask:
    """The task of `plan`. `groups`: per source, everything from the cursor before the step on."""
    spans = plan.spans
    counts = spans[:, 4]
    ends = np.cumsum(counts)
    ids = np.zeros(int(ends[-1]) if len(ends) else 0, np.int32)
    mask = np.ones(len(ids), np.uint8)
    following = np.full(len(spans), NO_TOKEN, np.int32)
    following_mask = np.ones(len(spans), np.uint8)
    where = np.zeros((len(spans), 2), np.int64)
    masked = False
    for index, name in enumerate(plan.sources):
        mine = np.flatnonzero(spans[:, 5] == index)
        if not len(mine):
            continue
        found = gather(groups[name], spans[mine][:, [6, 7, 8, 9, 10, 4]], NO_TOKEN)
        begins = ends[mine] - counts[mine]
        own_ends = np.cumsum(counts[mine])
        at = np.arange(len(found.ids), dtype=np.int64) + np.repeat(
            begins - (own_ends - counts[mine]), counts[mine]
        )
        ids[at] = found.ids
        following[mine] = found.following
        where[mine, 0], where[mine, 1] = found.files, found.offsets
        if found.mask is not None and found.following_mask is not None:
            masked = True
            mask[at] = found.mask
            following_mask[mine] = found.following_mask
    table = np.concatenate([spans[:, :7], where, spans[:, 10:11]], axis=1)
    return StepTask(
        plan.shape,
        plan.sequence_length,
        plan.sources,
        table,
        ids,
        following,
        mask if masked else None,
        following_mask if masked else None,
    )
