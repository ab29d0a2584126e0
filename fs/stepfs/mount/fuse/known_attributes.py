"""The attributes of names and inodes that are known in memory: the answers that never wait."""

from __future__ import annotations

from dataclasses import dataclass

from stepfs.format.ids import SliceIndex, Step
from stepfs.format.snapshot import StepEntry
from stepfs.lake.log.reader import LogReader
from stepfs.mount.fuse.control import Control
from stepfs.mount.fuse.files import FileTable
from stepfs.mount.fuse.pending_sizes import PendingSizes
from stepfs.view import attributes
from stepfs.view.attributes import Attributes
from stepfs.view.names import (
    CONTROL_DIRECTORY,
    LATEST,
    Fixed,
    SliceFile,
    StepDirectory,
    StepFile,
    WaitFile,
    directory_inode,
    node_of,
    parse_step,
)
from stepfs.view.ranks import RankMap
from stepfs.view.tree import Presence, Tree


@dataclass(frozen=True, eq=False, slots=True)
class KnownAttributes:
    """Reads the log's state and the open files afresh at every call."""

    reader: LogReader
    tree: Tree
    ranks: RankMap
    control: Control
    files: FileTable
    sizes: PendingSizes

    def in_root(self, name: bytes) -> Attributes | None:
        step = parse_step(name)
        if step is not None:
            if self.tree.presence(step) is Presence.ABSENT:
                return None
            return attributes.step_directory(self.reader, self.tree, step)
        if name == LATEST:
            newest = self.tree.latest()
            return None if newest is None else attributes.latest(self.reader, newest)
        return self.control.directory if name == CONTROL_DIRECTORY else None

    def unopenable(self, step: Step, index: SliceIndex) -> Attributes:
        """A file of a pending or released step, for a listing: size 0, unless the file is still open here. Another size
        than before would cut the pages that its readers have mapped."""
        entry = self.files.entry_of(step, index) if step < self.tree.next_step else None
        if entry is not None:
            return self.of_index(entry, index)
        return attributes.pending_file(self.reader, step, index, self.ranks.links)

    def looked_up_unopenable(self, step: Step, index: SliceIndex) -> Attributes:
        """The same for a lookup. A file of size 0 is one that the kernel takes for empty from now on."""
        found = self.unopenable(step, index)
        if found.size == 0:
            self.sizes.note(found.inode)
        return found

    def above(self, inode: int) -> Attributes | None:
        """The directory above an inode; None if either does not exist."""
        node = node_of(inode)
        if node is None:
            return None
        if isinstance(node, SliceFile):
            return self.attributes(directory_inode(node.step))
        above = {StepFile: Fixed.STEPS, WaitFile: Fixed.WAIT}.get(type(node), Fixed.ROOT)
        return self._fixed(Fixed.CONTROL if node in {Fixed.STEPS, Fixed.WAIT, Fixed.ORDER} else above)

    def attributes(self, inode: int) -> Attributes | None:
        """Attributes of an inode without waiting; None if it does not exist or is not in memory."""
        node = node_of(inode)
        if isinstance(node, StepDirectory):
            gone = self.tree.presence(node.step) is Presence.ABSENT
            return None if gone else attributes.step_directory(self.reader, self.tree, node.step)
        if isinstance(node, SliceFile):
            if node.index < self.ranks.grid.slices and self.tree.names_known(node.step):
                return self.looked_up_unopenable(node.step, node.index)
            entry = self.files.entry_of(node.step, node.index) or self.reader.entry_if_loaded(node.step)
            return None if entry is None else self.of_slice(entry, node)
        if isinstance(node, StepFile | WaitFile):
            return self.control.numbered(node)
        return None if node is None else self._fixed(node)

    def of_slice(self, entry: StepEntry, node: SliceFile) -> Attributes | None:
        """A committed slice; None if the step has no such slice."""
        if node.index >= entry.tgb.slices:
            return None
        return self.of_index(entry, node.index)

    def of_index(self, entry: StepEntry, index: SliceIndex) -> Attributes:
        """A slice that the committed step has."""
        return attributes.slice_file(entry, index, self.ranks.links)

    def _fixed(self, node: Fixed) -> Attributes | None:
        if node is Fixed.ROOT:
            return attributes.root(self.reader)
        if node is Fixed.LATEST:
            newest = self.tree.latest()
            return None if newest is None else attributes.latest(self.reader, newest)
        return self.control.fixed(node)
