"""The committed steps as the prefetcher sees them: those of one view."""

from __future__ import annotations

from stepfs.format.ids import Step
from stepfs.lake.log.reader import LogReader
from stepfs.view.tree import Tree


class CommittedSteps:
    """`stepfs.data.prefetch.prefetcher.Steps` of a view and its log."""

    def __init__(self, tree: Tree, reader: LogReader) -> None:
        self._tree = tree
        self._reader = reader
        self.entry_if_loaded = reader.entry_if_loaded
        self.entry = reader.entry
        self.lone_entry = reader.lone_entry

    @property
    def frontier(self) -> Step:
        return self._tree.last_visible()

    @property
    def first_live_step(self) -> Step:
        return self._tree.first_visible()
