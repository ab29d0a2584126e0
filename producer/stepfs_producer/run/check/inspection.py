"""A plan's sources as they are now: every file listed, a few records of each source read, nothing written.

All mistakes are reported at once, each with its place in the plan. How many tokens an epoch has is estimated from
the records read: the length of the text in a compressed file is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np

from stepfs.errors import RefusedError, StepfsError
from stepfs.format.planned import Listing
from stepfs_producer.plan.file.digest import with_defaults
from stepfs_producer.plan.file.problems import Problem, Where
from stepfs_producer.plan.file.schema import Plan
from stepfs_producer.run.compile import source_specs, tokenizer_spec, transform_spec
from stepfs_producer.sources.block import BlockAddress, BlockTask, Kind
from stepfs_producer.sources.compressed import is_compressed
from stepfs_producer.sources.corpus import list_corpus
from stepfs_producer.sources.layout import Layout
from stepfs_producer.sources.lines import RECORD_BYTES_MAX
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.transforms.documents import BAD
from stepfs_producer.transforms.images import library
from stepfs_producer.transforms.model_tokenizer import TEXT_BYTES_MAX, load_tokenizer, pinned
from stepfs_producer.transforms.records import timed_transform
from stepfs_producer.transforms.spec import TransformSpec
from stepfs_producer.transforms.user import function_of

T = TypeVar("T")
_AT_ONCE: Final = 16
_SAMPLE_BYTES: Final = 8 << 20  # of all sources together
_SAMPLE_BYTES_MAX: Final = 256 << 10  # of one
_SAMPLE_BLOCK_BYTES: Final = 1 << 20  # one byte range of a plain file


@dataclass(frozen=True, slots=True)
class CheckProblem:
    """A problem and the exit code that its error has."""

    problem: Problem
    exit_code: int


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """One source as it is now."""

    files: int
    bytes: int
    largest_block_bytes: int
    tokens: int | None  # of an epoch, estimated; None: the files are compressed, or no record gives a token
    tokens_at_once: int  # that a worker makes of its longest text, estimated; 0: of ids, or of records that give none
    sampled: int  # records
    bad: Mapping[int, str]  # those of them that cannot be decoded, with the reasons


@dataclass(slots=True)
class Inspection:
    """Facts and mistakes."""

    facts: dict[str, SourceFacts] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    findings: list[CheckProblem] = field(default_factory=list)

    def attempt(self, where: Where, look: Callable[[], T]) -> T | None:
        """The result of `look`; None if it raises: its error is a finding at `where`."""
        try:
            return look()
        except StepfsError as error:
            self.findings.append(CheckProblem(Problem(where, str(error)), error.exit_code))
        except OSError as error:
            self.findings.append(
                CheckProblem(Problem(where, f"{error.filename}: {error.strerror}"), StepfsError.exit_code)
            )
        return None


def inspect(plan: Plan, *, held_out: bool = False, directory: str = "") -> Inspection:
    """Look at the tokenizer, the user's functions and every source. Errors are findings."""
    found = Inspection()
    tokenizer = tokenizer_spec(plan, directory=directory)
    place: Where = ("tokenizer", "file") if plan.tokenizer.file else ("tokenizer",)
    loaded = found.attempt(place, lambda: pinned(tokenizer))  # read once, not by every source
    usable = loaded is not None and found.attempt(place, lambda: load_tokenizer(loaded)) is not None
    call = plan.cost.call
    if call is not None:
        found.attempt(("cost", "call"), lambda: function_of(call))
    specs = source_specs(plan, held_out=held_out, directory=directory)
    sources = with_defaults(plan)
    sample_bytes = min(_SAMPLE_BYTES // len(specs), _SAMPLE_BYTES_MAX)

    def look(spec: SourceSpec) -> None:
        where: Where = ("sources", spec.name)
        source = plan.sources[spec.name].transform
        sees = usable
        if source is not None:
            sees = found.attempt((*where, "transform"), lambda: function_of(source)) is not None and sees
        work = transform_spec(plan, sources[spec.name], loaded or tokenizer)
        if work.images is not None:
            sees = found.attempt((*where, "images"), library) is not None and sees
        listing = found.attempt((*where, "files"), lambda: list_corpus(spec))
        if listing is not None:
            found.listings[spec.name] = listing
            usual = work if sees else None
            facts = found.attempt(where, lambda: _facts(spec, listing, usual, sample_bytes))
            if facts is not None:
                found.facts[spec.name] = facts

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(look, specs.values()))
    return found


def _facts(spec: SourceSpec, listing: Listing, work: TransformSpec | None, sample_bytes: int) -> SourceFacts:
    """`RefusedError` if no record that was looked at can be decoded."""
    layout = Layout(spec, listing)
    nothing: tuple[int | None, float, int, Mapping[int, str]] = None, 0.0, 0, {}
    tokens, of_byte, sampled, bad = nothing if work is None else _sampled(spec, listing, work, sample_bytes)
    if sampled and len(bad) == sampled:
        raise RefusedError(
            f"none of the {sampled} records looked at can be decoded ({next(iter(bad.values()))}); name the right field or "
            "format, or repair the files"
        )
    of_model = work is not None and work.tokenizer.file is not None
    at_once = int(of_byte * min(_longest(listing), TEXT_BYTES_MAX if of_model else RECORD_BYTES_MAX))
    largest = layout.largest_block_bytes
    return SourceFacts(len(listing.files), listing.total_bytes, largest, tokens, at_once, sampled, bad)


def _longest(listing: Listing) -> int:
    """Bytes that no record exceeds: of a file, of a part; how long a line of a compressed file is, is not known."""
    return max(
        RECORD_BYTES_MAX if is_compressed(file.name) else max((size for _, size in file.parts), default=file.size)
        for file in listing.files
    )


def _sampled(
    spec: SourceSpec, listing: Listing, work: TransformSpec, sample_bytes: int
) -> tuple[int | None, float, int, Mapping[int, str]]:
    """Estimated tokens of an epoch and of a byte, records looked at, and the bad ones among them."""
    small = replace(spec, block_bytes=_SAMPLE_BLOCK_BYTES, epochs=None)
    layout = Layout(small, listing)
    for task in _tasks(layout):
        records = read_block(small, task).records
        if not len(records):
            continue
        count = max(int(np.searchsorted(records.ends, sample_bytes, side="right")), 1)
        some = records.part(0, count)
        made, _ = timed_transform(work, spec.seed, 0, spec.name, some)
        tokens = int(made.lengths[made.lengths != BAD].sum())
        all_tokens = _estimate(layout, listing, task, tokens, count / len(records), len(records))
        of_byte = 0.0 if records.kind is Kind.TOKENS else tokens / max(int(some.ends[-1]), 1)
        return all_tokens, of_byte, count, made.bad
    return None, 0.0, 0, {}


def _tasks(layout: Layout) -> Iterator[BlockTask]:
    """The first blocks of the first epoch."""
    place = BlockAddress(0, 0, 0)
    for _ in range(4):
        task = layout.task(place)
        if task is None or place.epoch:
            return
        yield task
        place = task.next_fragment


def _estimate(layout: Layout, listing: Listing, task: BlockTask, tokens: int, part: float, records: int) -> int | None:
    if not tokens:
        return None
    of_block = tokens / part
    all_records = sum(count for file in listing.files for count, _ in file.parts)
    if all_records:
        return round(of_block / records * all_records)
    if task.cut:
        return None  # of a compressed file it is not known which part this block is
    listed = sum(fragment.end - fragment.begin for fragment in task.fragments)
    return round(of_block * layout.total_bytes / listed)
