"""The contents of the root: one function from the log's state and the mount's options to names.

Everything here answers from memory, because a handler for the root must never wait on the store: the kernel holds
the directory's lock while one LOOKUP waits, and every other reader of the root would wait with it.
"""

import enum
from dataclasses import dataclass
from typing import Final, Protocol

from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.view.inodes import STEP_MAX

AHEAD_STEPS_MAX: Final = 1000  # how far beyond the frontier `--wait` resolves directories


class StepTable(Protocol):
    """The part of `stepfs.lake.log.reader.LogReader` that answers without I/O."""

    @property
    def identity(self) -> LakeIdentity: ...

    @property
    def state(self) -> LogState: ...

    @property
    def first_live_step(self) -> Step: ...

    def entry_if_loaded(self, step: Step) -> StepEntry | None: ...

    def time_ms(self, step: Step) -> int: ...


class Presence(enum.Enum):
    """The result of resolving a step's name."""

    COMMITTED = "committed"  # a directory whose files exist
    PENDING = "pending"  # a directory of future files: opening one waits for the commit
    GONE = "gone"  # listed for ever under --steps, but reclaimed (`released`), or never committed: empty
    ABSENT = "absent"  # ENOENT


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """The options that change the plain view."""

    steps: range | None = None  # --steps A:B: exactly these, from the start
    wait: bool = False  # --wait: names just beyond the frontier resolve

    def __post_init__(self) -> None:
        assert self.steps is None or (self.steps.step == 1 and 0 <= self.steps.start <= self.steps.stop)


class Tree:
    """The root directory of one mount. Reads the table afresh at every call, so a publication is atomic."""

    def __init__(self, table: StepTable, options: ViewOptions) -> None:
        self._table = table
        self.options = options
        self.need = Step(0)  # the least next step of this mount's own group; the view hides lower steps
        self._noted = self.first_visible()
        self.asked = 0  # how often somebody looked where new steps would show

    def ask(self) -> None:
        """Somebody looks how far the lake is: the next look at it is not put off. Any thread may call it."""
        self.asked += 1

    @property
    def next_step(self) -> Step:
        """Number of committed steps: the first step that is not committed yet."""
        return self._table.state.next_step

    def first_visible(self) -> Step:
        """The oldest step whose files can be opened."""
        return Step(max(self._table.first_live_step, self.need))

    def take_new_first_visible(self) -> Step | None:
        """The first visible step if it is newer than at the last call: the steps below have left the view."""
        before, self._noted = self._noted, self.first_visible()  # it falls when a group rolls back
        return self._noted if self._noted > before else None

    def last_visible(self) -> Step:
        """The newest step whose files can be opened."""
        newest = self.next_step - 1
        return Step(newest if self.options.steps is None else min(newest, self.options.steps.stop - 1))

    def readable(self, step: Step) -> bool:
        """Whether the files of this step can be opened in this mount now."""
        if self.options.steps is not None and step not in self.options.steps:
            return False
        return self.first_visible() <= step < self.next_step

    def awaited(self, step: Step) -> bool:
        """Whether the step may still come: not committed, and the lake is not sealed."""
        return self.next_step <= step <= STEP_MAX and not self._table.state.sealed

    def names_known(self, step: Step) -> bool:
        """Whether the files of a pending or released step have names and attributes, all but their sizes.

        Only under `--steps`: otherwise `glob`, `exists` and `find` would wait once per name, and end with lists of
        different lengths on different nodes, or in a trainer that resumes. Under `--wait` a name exists only with its
        step; loops on `exists` rely on it.
        """
        if self.options.steps is None:
            return False
        return self.released(step) or self.presence(step) is Presence.PENDING

    def released(self, step: Step) -> bool:
        """Whether the step is listed under `--steps` although it lies behind the checkpoints."""
        return self.presence(step) is Presence.GONE and step < self.next_step

    def presence(self, step: Step) -> Presence:
        """Resolve the name of a step, without a request to the store."""
        if self.readable(step):
            return Presence.COMMITTED
        if step >= self.next_step:
            self.ask()
        steps = self.options.steps
        if steps is not None:
            if step not in steps:
                return Presence.ABSENT
            return Presence.PENDING if self.awaited(step) else Presence.GONE
        if self.options.wait and self.awaited(step) and step < self.next_step + AHEAD_STEPS_MAX:
            return Presence.PENDING
        return Presence.ABSENT

    def listed(self) -> range:
        """The steps a listing of the root names, in order."""
        self.ask()
        return listed_steps(self.options, self.first_visible(), self.next_step)

    def latest(self) -> Step | None:
        """The target of `latest`; None under `--steps`, and before the first step."""
        self.ask()
        newest = Step(self.next_step - 1)
        if self.options.steps is not None or not self.readable(newest):
            return None
        return newest


def listed_steps(options: ViewOptions, first_visible: Step, next_step: Step) -> range:
    """The steps that a listing names where those from `first_visible` to the one before `next_step` can be opened."""
    return range(min(first_visible, next_step), next_step) if options.steps is None else options.steps
