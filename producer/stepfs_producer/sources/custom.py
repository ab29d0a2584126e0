"""A source of one's own: `format: "module:Class"` in a plan, where Class reads files that stepfs does not know.

    class Fasta:
        suffixes = (".fa",)                            # files it takes from directories; left out: all

        def records(self, file, part):                 # `file` is an open, seekable binary file
            for number, entry in enumerate(file.read().split(b">")[1:]):
                yield number, entry.partition(b"\\n")[2].replace(b"\\n", b"")

yields (offset, value): numbers that grow, and a text (str or UTF-8 bytes), a dict (of which `text_field` or
`tokens_field` is taken, or all of it, bytes included, for a transform), or, with `kind = "tokens"`, a sequence of token
ids. `Bad("why")` as value is a record that cannot be decoded. An exception stops the run, except that one of reading the
file is retried.
`parts(file)`, if there is one, lists (records, bytes) of the parts that can be read alone; `records` then gets the number
of one. Without it the file is read whole, in order. The same file must always give the same records: declare a new
`version` in the plan when the code yields other records. The plan's `options` are the arguments of Class, as texts.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, BinaryIO, Protocol

from stepfs.errors import StepfsError, UsageError
from stepfs_producer.plan.sources import SourceFiles, WithText
from stepfs_producer.sources.files import Format, OpenFile, Stream, buffered, open_listed
from stepfs_producer.sources.record import (
    Bad,
    Fragment,
    Kind,
    Raw,
    SourceSpec,
    Unit,
    Value,
    fields_of,
    kind_of,
    packed,
    tagged,
    text_of,
    tokens_of,
    weight_of,
)


class OwnReader(Protocol):
    """The methods that the class must have. `suffixes`, `kind` and `parts` may be left out."""

    def records(self, file: BinaryIO, part: int) -> Iterator[tuple[int, Any]]: ...


class OwnFormat(Format):
    """A class of the user's as a format."""

    def __init__(self, name: str, reader: OwnReader) -> None:
        self._name = name
        self._reader = reader
        self.suffixes: tuple[str, ...] = tuple(getattr(reader, "suffixes", ()))
        self._in_parts = hasattr(reader, "parts")
        self._kind = getattr(reader, "kind", None)

    def kind(self, spec: SourceSpec) -> Kind:
        return self._kind_of(spec.source)

    def _kind_of(self, source: SourceFiles) -> Kind:
        return kind_of(source, Kind.FIELDS) if self._kind is None else Kind(self._kind)

    def unit(self, name: str) -> Unit:  # noqa: ARG002
        return Unit.PARTS if self._in_parts else Unit.WHOLE

    def parts(self, spec: SourceSpec, file: OpenFile) -> Sequence[tuple[int, int]]:  # noqa: ARG002
        if not self._in_parts:
            return ()
        with buffered(file) as (stream, raw), self._own_code(file.location, raw):
            parts: Any = self._reader.parts(stream)  # type: ignore[attr-defined]
            return [(int(records), int(count)) for records, count in parts]

    def records(self, spec: SourceSpec, fragment: Fragment) -> Iterator[Raw]:
        with (
            open_listed(spec, fragment.ref) as file,
            self._opened(file) as (stream, raw),
            self._own_code(file.location, raw),
        ):
            for offset, stored in self._reader.records(stream, max(0, fragment.part)):
                value = self._value(spec.source, stored)
                yield Raw(fragment.file, int(offset), weight_of(value), value)

    def _opened(self, file: OpenFile) -> AbstractContextManager[tuple[BinaryIO, Stream]]:
        return buffered(file)

    def where(self, spec: SourceSpec, first: Fragment, offset: int) -> int | None:  # noqa: ARG002
        return None  # the class counts as it likes

    def _value(self, source: SourceFiles, stored: Any) -> Value:
        kind = self._kind_of(source)
        if isinstance(stored, Bad):
            return stored
        if isinstance(stored, dict):
            whole = kind in {Kind.JSON, Kind.FIELDS}
            return tagged(source, packed(stored) if whole else fields_of(source, stored), stored)
        if source.tag is not None:
            raise UsageError(
                f"{self._name} yields {type(stored).__name__}, which has no field for the plan's tag; yield a dict"
            )
        if kind is Kind.TEXT and isinstance(stored, (str, bytes)):
            assert isinstance(source, WithText)
            return text_of(stored, source.text_field)
        if kind is Kind.TOKENS and not isinstance(stored, (str, bytes)):
            return tokens_of(stored)
        raise UsageError(f"{self._name} yields {type(stored).__name__} where the plan expects {kind.value}")

    @contextmanager
    def _own_code(self, location: str, raw: Stream) -> Iterator[None]:
        try:
            yield
        except (GeneratorExit, MemoryError, StepfsError):
            raise
        except Exception as error:
            if raw.failed is not None:
                raise raw.failed from error
            raise self._refused(location, error) from error

    def _refused(self, location: str, error: Exception) -> StepfsError:
        """What an error of the class says of a file."""
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return UsageError(f"{location}: {self._name} raised {reason}; mend it, or leave the file out")


@lru_cache(maxsize=256)
def own_format(name: str, options: tuple[tuple[str, str], ...]) -> OwnFormat:
    """The format `module:Class`, made with these options. `UsageError` if there is none, or it cannot be made."""
    module, _, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)(**dict(options))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"format {name}: {error}; name a class as `module:Class`, importable from here") from error
    if not callable(getattr(made, "records", None)):
        raise UsageError(f"format {name}: the class has no method `records`; see stepfs_producer.sources.custom")
    return OwnFormat(name, made)
