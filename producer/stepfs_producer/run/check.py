"""A plan looked at before a run: inspected, estimated, simulated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
import trio

from stepfs._internal.image_patches import need_pillow
from stepfs.errors import AbsentError, RefusedError, StepfsError
from stepfs.format.planned import Listing
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store
from stepfs_producer.plan.mix import ONE, MixEntry
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.parts import Until
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.plan.samples import EXCLUDED, Heads
from stepfs_producer.plan.sources import Long, OnError
from stepfs_producer.plan.values import Document, Problem, Where
from stepfs_producer.run.lake import sealed_error
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.pipeline import conduct_here
from stepfs_producer.run.prepare import (
    LocatedPlan,
    PreparedPlan,
    fit_plan,
    looked_up,
    prepare_plan,
    refuse_unfit,
    schedule_of,
    source_specs,
    tokenizer_spec,
    transform_spec,
)
from stepfs_producer.run.results import (
    PlanTotals,
    Progress,
    SimulationResult,
    bad_records_named,
    callbacks_of,
    show_nothing,
    totals_from,
)
from stepfs_producer.sources.compressed import is_compressed
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import (
    RECORD_BYTES_MAX,
    BlockTask,
    Kind,
    Records,
    SourceSpec,
    Unit,
    unpacked,
)
from stepfs_producer.transforms.documents import Tokenised, TransformSpec
from stepfs_producer.transforms.model_folder import other_ids
from stepfs_producer.transforms.records import open_transform, timed_transform
from stepfs_producer.transforms.tokenizer import TEXT_BYTES_MAX, ModelTokenizer, load_tokenizer, pinned
from stepfs_producer.transforms.user_function import function_of

if TYPE_CHECKING:
    from stepfs_producer.transforms.chat import Ending

T = TypeVar("T")
_AT_ONCE: Final = 16
_SAMPLE_BYTES: Final = 8 << 20  # of all sources together
_SAMPLE_BYTES_MAX: Final = 256 << 10  # of one
_PAGE_ROWS: Final = 1024
_TEXTS: Final = 100  # compared with transformers
_TEXT_BYTES: Final = 1 << 10
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
    page_bytes: int  # that a page of its Parquet files can have; 0: of other files
    tokens: int | None  # of an epoch, estimated; None: the files are compressed, or no record gives a token
    tokens_at_once: int  # that a worker makes of its longest text, estimated; 0: of ids, or of records that give none
    sampled: int  # records
    bad: Mapping[int, str]  # those of them that cannot be decoded, with the reasons
    unread: Sequence[str]  # damaged files without a readable part
    spelled: str | None  # a control token that a record looked at spells
    learned: float | None  # share of the tokens looked at that the loss looks at; None: no token was looked at
    documents: int  # looked at
    document_tokens: float | None  # mean of them; None: there are none
    dropped: int  # records looked at that are longer than a row, and are no document
    excluded: int  # records looked at that the plan leaves out
    tools: bool  # whether a conversation looked at has tools, and the plan does not name their field
    left: int  # documents looked at that `fim` leaves as they are, because they are longer than a row
    ending: Ending | None  # of the answers of chats; None: of other sources, or not known
    texts: Sequence[str]  # beginnings of some records
    met: AbstractSet[Document]  # that `exclude` names, of the records looked at


@dataclass(slots=True)
class Inspection:
    """Facts and mistakes."""

    facts: dict[str, SourceFacts] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    findings: list[CheckProblem] = field(default_factory=list)
    tokenizer: str = ""  # its ends
    other_ids: str | None = None  # that transformers gives
    unmet: set[Document] = field(
        default_factory=set
    )  # that `exclude` names: of no listed file; looked at deeply, no record

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


def inspect(plan: Plan, *, held_out: bool = False, directory: str = "", deep: bool = False) -> Inspection:
    """Look at the tokenizer, the user's functions and every source, with `deep` at every record. Errors are findings."""
    found, plan = Inspection(), resolve(plan)
    tokenizer = tokenizer_spec(plan, directory=directory)
    place: Where = ("tokenizer", "file") if plan.tokenizer.file else ("tokenizer",)
    loaded = found.attempt(place, lambda: pinned(tokenizer))  # read once, not by every source
    opened = None if loaded is None else found.attempt(place, lambda: load_tokenizer(loaded))
    usable = opened is not None
    found.tokenizer = "" if opened is None else opened.ends
    call = plan.cost.call
    if call is not None:
        found.attempt(("cost", "call"), lambda: function_of(call))
    specs = source_specs(plan, held_out=held_out, directory=directory)
    sample_bytes = None if deep else min(_SAMPLE_BYTES // len(specs), _SAMPLE_BYTES_MAX)

    def look(spec: SourceSpec) -> None:
        where: Where = ("sources", spec.name)
        source, call = spec.source, spec.source.transform
        sees = usable
        if call is not None:
            sees = found.attempt((*where, "transform"), lambda: function_of(call)) is not None and sees
        chat = ("tokenizer", "chat_template")
        work = found.attempt(chat, lambda: transform_spec(plan, spec.name, loaded or tokenizer, directory=directory))
        if work is None:
            return
        if opened is not None:
            place = (*where, "chat" if source.fim is None else "fim")
            sees = found.attempt(place, lambda: open_transform(work, opened)) is not None and sees
        if source.images is not None:
            sees = found.attempt((*where, "images"), need_pillow) is not None and sees
        listing = found.attempt((*where, "files"), lambda: list_corpus(spec))
        if listing is not None:
            found.listings[spec.name] = listing
            usual = work if sees else None
            facts = found.attempt(where, lambda: _facts(spec, listing, usual, sample_bytes))
            if facts is not None:
                found.facts[spec.name] = facts

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(look, specs.values()))
    found.unmet = _unmet(plan, found, deep=deep)
    if opened is not None:
        texts = [text for facts in found.facts.values() for text in facts.texts if not opened.spelled(text)]
        found.other_ids = other_ids(tokenizer.tokenizer, texts[:_TEXTS])
    return found


def _unmet(plan: Plan, found: Inspection, *, deep: bool) -> set[Document]:
    if deep:
        return set(plan.exclude).difference(*(facts.met for facts in found.facts.values()))
    listed = {(name, file.name) for name, listing in found.listings.items() for file in listing.files}
    return {one for one in plan.exclude if not isinstance(one, str) and one[:2] not in listed}


def _facts(spec: SourceSpec, listing: Listing, work: TransformSpec | None, sample_bytes: int | None) -> SourceFacts:
    """`RefusedError` if no record that was looked at can be decoded. `sample_bytes` None: all are looked at."""
    layout = Layout(spec, listing)
    if work is None:
        found = _Sample()
    elif sample_bytes is None:
        found = _all(spec, listing, work)
    else:
        found = _sampled(spec, listing, work, sample_bytes)
    sampled, bad = found.records, found.bad
    if sampled and len(bad) == sampled:
        raise RefusedError(
            f"none of the {sampled} records looked at can be decoded ({next(iter(bad.values()))}); name the right field or "
            "format, or repair the files"
        )
    of_model = work is not None and work.tokenizer.file is not None
    at_once = int(found.tokens_of_byte * min(_longest(listing), TEXT_BYTES_MAX if of_model else RECORD_BYTES_MAX))
    largest = layout.largest_block_bytes
    rule = format_of(spec)
    unread = [one.name for one in listing.files if one.size and not one.parts and rule.unit(one.name) is Unit.PARTS]
    return SourceFacts(
        len(listing.files),
        listing.total_bytes,
        largest,
        _page_bytes(listing) if spec.source.format == "parquet" else 0,
        found.tokens,
        at_once,
        sampled,
        bad,
        unread,
        found.spelled,
        found.counts.learned / found.counts.tokens if found.counts.tokens else None,
        found.counts.documents,
        found.counts.tokens / found.counts.documents if found.counts.documents else None,
        found.counts.dropped,
        found.counts.excluded,
        found.tools,
        found.counts.left,
        None if work is None else _ending(work),
        found.texts,
        found.met,
    )


def _ending(work: TransformSpec) -> Ending | None:
    if work.chat is None:
        return None
    from stepfs_producer.transforms.chat import chats  # noqa: PLC0415 - jinja2 is optional

    return chats(work.chat, work.tokenizer).ending()


class _Counts(NamedTuple):
    """Sums over records."""

    tokens: int = 0
    learned: int = 0
    documents: int = 0
    dropped: int = 0
    left: int = 0
    excluded: int = 0

    def plus(self, made: Tokenised, work: TransformSpec) -> _Counts:
        tokens = made.heads.tokens
        whole = work.source.is_of_chats or work.source.long is Long.DROP
        long = np.zeros(len(tokens), np.bool_) if work.tokens_max is None or not whole else tokens > work.tokens_max
        if work.source.pair is None and made.heads.documents is not None:
            long &= made.heads.documents.lengths == 0
        here = (
            len(made.samples.ids.values),
            made.learned,
            _documents(made.heads),
            int(long.sum()),
            0 if made.heads.plain is None else int(made.heads.plain.sum()),
            int((tokens == EXCLUDED).sum()),
        )
        return _Counts(*map(sum, zip(self, here, strict=True)))


@dataclass(frozen=True, slots=True)
class _Sample:
    """What some records of a source show."""

    tokens: int | None = None  # of an epoch, estimated
    tokens_of_byte: float = 0.0
    records: int = 0
    bad: Mapping[int, str] = field(default_factory=dict)
    spelled: str | None = None
    counts: _Counts = field(default_factory=_Counts)
    texts: Sequence[str] = ()
    tools: bool = False  # that the plan does not name
    met: AbstractSet[Document] = frozenset()


def _has_tools(work: TransformSpec, records: Records) -> bool:
    chat = work.source.chat
    if chat is None or chat.tools is not None:
        return False
    read = json.loads if records.kind is Kind.JSON else unpacked
    for data in records.data:
        with suppress(ValueError, RecursionError):  # a bad record is counted as such
            record = read(data.tobytes())
            if isinstance(record, dict) and record.get("tools") not in (None, "", "[]", []):
                return True
    return False


def _page_bytes(listing: Listing) -> int:
    """Writers look at a page's size once in 1024 rows."""
    parts = [part for file in listing.files for part in file.parts if part[0]]
    return max((size * min(rows, _PAGE_ROWS) // rows for rows, size in parts), default=0)


def _longest(listing: Listing) -> int:
    """Bytes that no record exceeds: of a file, of a part; how long a line of a compressed file is, is not known."""
    return max(
        RECORD_BYTES_MAX if is_compressed(file.name) else max((size for _, size in file.parts), default=file.size)
        for file in listing.files
    )


def _sampled(spec: SourceSpec, listing: Listing, work: TransformSpec, sample_bytes: int) -> _Sample:
    small = replace(spec, source=spec.source.changed(epochs=None), sample_bytes=_SAMPLE_BLOCK_BYTES)
    layout = Layout(small, listing)
    for task in _tasks(layout):
        records = read_block(small, task).records
        if not len(records):
            continue
        count = max(int(np.searchsorted(records.data.ends, sample_bytes, side="right")), 1)
        some = records.part(0, count)
        data = some.data.values
        share = len(data) / len(records.data.values) if len(data) else count / len(records)  # of the bytes
        made, _ = timed_transform(work, spec.seed, 0, spec.name, some)
        counts = _Counts().plus(made, work)
        tokens = counts.tokens
        all_tokens = _estimate(layout, listing, task, tokens, share, len(records))
        of_byte = 0.0 if records.kind is Kind.TOKENS else tokens / max(len(data), 1)
        tokenizer, spelled, texts = load_tokenizer(work.tokenizer), None, list[str]()
        if isinstance(tokenizer, ModelTokenizer) and records.kind is not Kind.TOKENS:
            spelled = tokenizer.spelled(data.tobytes().decode(errors="replace"))
            begins = (0, *some.data.ends)
            texts = [data[begin : begin + _TEXT_BYTES].tobytes().decode(errors="ignore") for begin in begins]
        return _Sample(
            all_tokens,
            of_byte,
            count,
            made.bad,
            spelled,
            counts,
            texts[:_TEXTS],
            _has_tools(work, some),
            {*some.excluded.values()},
        )
    return _Sample(tokens_of_byte=1.0)  # the records are longer than what is looked at: at most a token a byte


def _documents(heads: Heads) -> int:
    several = 0 if heads.documents is None else int(np.maximum(heads.documents.lengths - 1, 0).sum())
    return int((heads.tokens > 0).sum()) + several


def _all(spec: SourceSpec, listing: Listing, work: TransformSpec) -> _Sample:
    """Every record of an epoch; bad ones by file and place. Of damaged files the readable beginnings."""
    whole = replace(spec, source=spec.source.changed(epochs=None, on_error=OnError(do="skip", file="skip")))
    layout, place = Layout(whole, listing), BlockAddress(0, 0, 0)
    counts, records, size, tools = _Counts(), 0, 0, False
    bad: dict[int, str] = {}
    met: set[Document] = set()
    while not place.epoch and (task := layout.task(place)) is not None:
        block = read_block(whole, task)
        made, _ = timed_transform(work, spec.seed, 0, spec.name, block.records)
        for index, why in made.bad.items():
            name = listing.files[int(block.records.files[index])].name
            bad[records + index] = f"{name} at {block.records.offsets[index]}: {why}"
        counts, records = counts.plus(made, work), records + len(block.records)
        met |= {*block.records.excluded.values()}
        tools = tools or _has_tools(work, block.records)
        size += len(block.records.data.values) if block.records.kind is not Kind.TOKENS else 0
        place = block.follows
    tokens = counts.tokens
    return _Sample(tokens or None, tokens / size if size else 0.0, records, bad, None, counts, tools=tools, met=met)


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


@dataclass(frozen=True, slots=True)
class PlanEstimate:
    """Figures that do not stand in the plan."""

    mix: tuple[MixEntry, ...]
    step_tokens: int
    steps: int | None  # at most; None: `until` gives neither steps nor tokens
    tokens: dict[str, int] | None  # that each source gives until then


def estimate_plan(plan: Plan) -> PlanEstimate:
    mix = schedule_of(plan).entries
    step_tokens = plan.output.mesh.data_ranks * plan.output.micro_batches * plan.micro_batch_tokens
    steps = _steps(resolve(plan).until, step_tokens)
    tokens = None if steps is None else _tokens(sorted(plan.sources), mix, steps, step_tokens)
    return PlanEstimate(mix, step_tokens, steps, tokens)


def _steps(until: Until, step_tokens: int) -> int | None:
    bounds = [] if until.steps is None else [until.steps]
    if until.tokens is not None:
        bounds.append(-(-until.tokens // step_tokens))
    return min(bounds, default=None)


def _tokens(names: Sequence[str], mix: tuple[MixEntry, ...], steps: int, step_tokens: int) -> dict[str, int]:
    """Tokens by source over full steps: shares are constant or linear between two entries."""
    total = dict.fromkeys(names, Fraction(0))
    ends = [entry.step for entry in mix[1:]] + [steps]
    for number, (entry, end) in enumerate(zip(mix, ends, strict=True)):
        after = mix[number + 1] if number + 1 < len(mix) else None
        span = min(end, steps) - entry.step
        if span <= 0:
            break
        for index, (name, begin) in enumerate(zip(names, entry.shares, strict=True)):
            slope = Fraction(0)
            if after is not None and after.ramp:
                slope = Fraction(after.shares[index] - begin, after.step - entry.step)
            total[name] += begin * span + slope * span * (span - 1) / 2
    return {name: int(share * step_tokens / ONE) for name, share in total.items()}


async def simulate_plan(
    place: LocatedPlan,
    steps: int,
    workers: int | None = None,
    *,
    say: Callable[[str], None],
    progress: Progress = show_nothing,
) -> SimulationResult:
    """Plan the first steps over the real records: no payload is made, no lake touched.

    `say` gets lines for people: the bad records that may explain an error.
    """
    begun_s = time.monotonic()
    prepared = await looked_up(place)
    state = Planner(prepared.rules).begin()
    totals = PlanTotals(state, state)
    with progress("simulate", steps) as show, bad_records_named(totals, say):
        callbacks = callbacks_of(prepared, totals, show)
        reason = await conduct_here(
            prepared, place.directory, workers, None, callbacks, state, steps_max=steps, of_step=0.0
        )
    reason = reason or "the limit is reached"
    return SimulationResult(prepared.digest, totals, reason, time.monotonic() - begun_s)


async def compare_with_lake(
    place: LocatedPlan, listings: Mapping[str, Listing], options: RunOptions, say: Callable[[str], None]
) -> bool:
    """Whether there is the lake; if so, `RefusedError` as a run would raise it. Writes nothing."""
    prepared = await trio.to_thread.run_sync(prepare_plan, place, listings, abandon_on_cancel=True)
    async with aclosing(open_store(options.lake, options=options.store_options)) as store:
        try:
            identity = await open_lake(store)
        except AbsentError:
            return False
        position, sealed = await refuse_unfit(store, identity, place, prepared, options=options, say=say)
        accepts = options.accept_changes
        prepared = await fit_plan(store, identity, place, prepared, position, accept_changes=accepts, say=say)
    if sealed:
        await _refuse_steps(place, prepared, position, options.lake)
    return True


async def _refuse_steps(place: LocatedPlan, prepared: PreparedPlan, position: object, lake: str) -> None:
    """`SealedError` if the plan has a further step, as one that has not begun surely does."""
    if position is None:
        raise sealed_error(lake)

    def refuse(*_: object) -> None:
        raise sealed_error(lake)

    totals = totals_from(position, prepared.rules)
    callbacks = callbacks_of(prepared, totals, refuse)
    await conduct_here(prepared, place.directory, 1, None, callbacks, totals.start, steps_max=totals.start.step + 1)
