"""How many workers a run needs.

need = seconds of task work per step × steps per second that trainers take ÷ 0.8. Trainers take the appended steps: while
they lag, an append waits for them. So workers without a pause need a quarter more, until the run waits for trainers, the
store or a pace. None of it can show in a step (hazard P2).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from stepfs_producer.run.bottleneck import BUSY

LOOK_EVERY_S: Final = 5.0  # a look is long beside a task, so that it is no accident that all workers are busy
FEWER_AFTER_S: Final = 60.0  # that fewer would have been enough
FEWER_EVERY_S: Final = 10.0


def workers_needed(work_s: float, steps: int, seconds: float, steps_per_second: float | None) -> float:
    """`work_s`: seconds of tasks, and `steps` appended, in these seconds. `steps_per_second`: a pace that is wanted."""
    rate = steps / seconds
    if steps_per_second is not None and steps:
        rate = steps_per_second  # whether it is reached or not
    return work_s / steps * rate / BUSY if steps else work_s / seconds / BUSY


class WorkersWanted:
    """More at once; one fewer every ten seconds, after a minute in which fewer would have been enough."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._workers = least
        self._needs: deque[tuple[float, float]] = deque()  # of the last minute: when, how many
        self._changed_s = -math.inf

    def next(self, now_s: float, need: float) -> int:
        """How many from now on. `need`: since the last call."""
        needs = self._needs
        needs.append((now_s, need))
        while len(needs) > 1 and needs[1][0] <= now_s - FEWER_AFTER_S:
            needs.popleft()
        wanted = min(max(math.ceil(max(one for _, one in needs)), self._least), self._most)
        watched = needs[0][0] <= now_s - FEWER_AFTER_S
        if wanted > self._workers:
            self._workers, self._changed_s = wanted, now_s
        elif wanted < self._workers and watched and now_s - self._changed_s >= FEWER_EVERY_S:
            self._workers, self._changed_s = self._workers - 1, now_s
        return self._workers
