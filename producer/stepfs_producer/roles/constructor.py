"""What a constructor does with a planned step: its tokens become one payload per rank."""

from __future__ import annotations

import numpy as np

from stepfs_producer.payloads.encode import encoder_for
from stepfs_producer.payloads.rank_arrays import rank_arrays
from stepfs_producer.payloads.step_task import PayloadSpec, StepTask


def construct(spec: PayloadSpec, task: StepTask) -> tuple[list[bytes], list[int]]:
    """The payload of each rank, and the number of spans (documents, or parts of them) in each.

    The same task gives the same bytes in every process. `UsageError` for an unknown extension.
    """
    encode = encoder_for(spec.ext, vocabulary=spec.vocabulary)
    if len(task.ids):
        assert 0 <= int(task.ids.min()) <= int(task.ids.max()) < spec.vocabulary
    arrays = rank_arrays(task, padding=spec.padding, labels_shifted=spec.labels_shifted)
    payloads = [encode(rank) for rank in arrays]
    records = np.bincount(task.spans[:, 0], minlength=task.shape[0])
    return payloads, records.tolist()
