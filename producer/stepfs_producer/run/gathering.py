"""A step plan and the samples that are here → the task of a constructor, which then depends on nothing but itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stepfs_producer.payloads.step_task import StepTask
from stepfs_producer.plan.step import StepPlan
from stepfs_producer.run.held import Gathered, Group, gather


def task_of(plan: StepPlan, groups: Mapping[str, tuple[Group, ...]]) -> StepTask:
    """The task of `plan`. `groups`: per source, everything from the cursor before the step to the one behind it."""
    spans = plan.spans
    counts = spans[:, 4]
    ends = np.cumsum(counts)
    masked = any(one.tokenised.mask is not None for of_source in groups.values() for one in of_source)
    found = Gathered.room_for(len(spans), int(ends[-1]) if len(ends) else 0, masked=masked)
    for index, name in enumerate(plan.sources):
        mine = np.flatnonzero(spans[:, 5] == index)
        addresses = spans[mine][:, [6, 7, 8, 9, 10, 4]]
        gather(groups[name], addresses, mine, ends[mine] - counts[mine], found)
    return StepTask(
        plan.shape,
        plan.sequence_length,
        plan.sources,
        np.column_stack([spans[:, :7], found.files, found.offsets, spans[:, 10]]),
        found.ids,
        found.following,
        found.mask,
        found.following_mask,
    )
