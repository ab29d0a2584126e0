"""The log as following needs it, as a small protocol, so that its tests need no store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stepfs.format.ids import Step
from stepfs.format.snapshot import StepEntry
from stepfs.view.tree import StepTable


class Reader(StepTable, Protocol):
    """`stepfs.lake.log.reader.LogReader`."""

    async def poll(self, published: Callable[[], None]) -> bool: ...

    async def lone_entry(self, step: Step) -> StepEntry: ...
