"""What a mount shows, asked of its daemon: the one answer for commands and trainers that name its directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepfs._internal.control_files import read_config, read_status
from stepfs.errors import AbsentError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Step
from stepfs.view.inodes import STEP_MAX
from stepfs.view.ranks import FileNames, rank_map
from stepfs.view.tree import StepTable, ViewOptions, listed_steps


@dataclass(frozen=True, slots=True)
class MountedLake:
    """The lake that a mount shows, from its daemon."""

    lake: str
    endpoint_url: str | None
    group: str | None


def mounted_lake(directory: Path) -> MountedLake:
    """`AbsentError` if the directory is not a stepfs mount; other errors as `read_control_file`."""
    config: Any = read_config(directory)
    return MountedLake(config["lake"], config["endpoint_url"], config["group"])


@dataclass(frozen=True, slots=True)
class View:
    """The steps and the ranks of a mount, or of a lake as a mount without options shows it, at one moment."""

    lake_id: str
    first_visible: Step
    next_step: Step  # the first that is not committed
    sealed: bool
    options: ViewOptions = field(default_factory=ViewOptions)
    world: int | None = None
    mesh: str | None = None

    @classmethod
    def of_mount(cls, directory: Path) -> View:
        """Errors as `read_control_file`."""
        config: Any = read_config(directory)
        status: Any = read_status(directory)
        steps = None if config["steps"] is None else range(*config["steps"])
        return cls(
            status["lake_id"],
            Step(status["first_step"]),
            Step(status["next_step"]),
            status["sealed"],
            ViewOptions(steps),
            status["world"],
            config["mesh"],
        )

    @classmethod
    def of_log(cls, log: StepTable) -> View:
        state = log.state
        return cls(log.identity.lake_id, log.first_live_step, state.next_step, state.sealed)

    def listed(self) -> range:
        """The steps that a listing names, committed or not."""
        return listed_steps(self.options, self.first_visible, self.next_step)

    def openable(self) -> range:
        """The steps that may be opened, now or when they come."""
        if self.options.steps is not None:
            return self.options.steps
        return range(self.first_visible, self.next_step if self.sealed else STEP_MAX + 1)

    @property
    def ends(self) -> bool:
        """Whether the last step is known: no other is listed later."""
        return self.sealed or self.options.steps is not None

    def readable(self) -> range:
        """The committed steps that can be opened."""
        steps = range(self.next_step) if self.options.steps is None else self.options.steps
        first, stop = max(steps.start, self.first_visible), min(steps.stop, self.next_step)
        return range(first, max(first, stop))

    def check(self, step: int) -> Step:
        """The step. `AbsentError` for one that cannot be opened."""
        steps = self.readable()
        if step in steps:
            return Step(step)
        extent = f"steps {steps[0]} to {steps[-1]} are" if steps else "none is"
        raise AbsentError(f"step {step} is not here ({extent})")

    def names(self, identity: LakeIdentity) -> FileNames:
        return FileNames(rank_map(identity.grid, world=self.world, mesh=self.mesh), identity.ext)
