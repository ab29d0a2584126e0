"""What a format says of its files: which of them it takes, the fragments of a file, and the records of a fragment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from stepfs_producer.sources.block import Fragment, Kind, Unit
from stepfs_producer.sources.fields import Raw, Value
from stepfs_producer.sources.files.found import FoundFile
from stepfs_producer.sources.files.opened import OpenFile
from stepfs_producer.sources.spec import SourceSpec


class Format(ABC):
    """One format. Its objects hold nothing but parameters."""

    suffixes: tuple[str, ...] = ()  # ends of the names that it takes from directories; (): all

    @abstractmethod
    def kind(self, spec: SourceSpec) -> Kind: ...

    @abstractmethod
    def unit(self, name: str) -> Unit: ...

    @abstractmethod
    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        """The records of a fragment in stored order."""

    def decode(self, spec: SourceSpec, stored: Any) -> Value:  # noqa: ARG002
        """The value of `Raw.stored`; by default `records` has decoded it."""
        value: Value = stored
        return value

    def entries(self, files: Sequence[str]) -> Sequence[str]:
        """The entries to search, given the plan's `files`."""
        return files

    def choose(self, found: Sequence[FoundFile]) -> list[FoundFile]:
        """The files to list."""
        return list(found)

    def beside(self, name: str) -> str:  # noqa: ARG002
        """The file with the places of the records of `name`; "" if it has them itself."""
        return ""

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        """(records, bytes) of the file's parts; () if it has none. Refuses a file that it cannot read."""
        return ()

    def where(self, spec: SourceSpec, first: Fragment, offset: int) -> int | None:  # noqa: ARG002
        """The byte, or row, at which the record at `offset` of a file begins; None: it may be in any fragment. `first`:
        one of the file's."""
        return offset
