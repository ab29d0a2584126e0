"""What the model reads: the documents of a payload as text, part by part, with what the loss looks at.

A part is a run of tokens that are all learned or all not, or one token that is no text. Learned is the token, and not the
place before it at which a shifted label stands.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise, zip_longest
from typing import Any, Final, cast

import numpy as np
import trio
from numpy.typing import NDArray

from stepfs._internal.image_patches import ENCODED, ENCODED_AS, holds_encoded
from stepfs.errors import AbsentError, CorruptError, MissingPackageError, RefusedError, UsageError
from stepfs.format.ids import Step
from stepfs.format.planned import read_plan_position
from stepfs.lake.kept_plans import LineageReader
from stepfs.payload import NoSpansError, UnreadablePayloadError, expand, last_suffix, read_arrays, read_spans
from stepfs_producer.payloads.files import STACKED
from stepfs_producer.payloads.step import COUNTS
from stepfs_producer.plan.arrays import IGNORED
from stepfs_producer.plan.mix import MixEntry, MixSchedule, normalise
from stepfs_producer.plan.model import TOKENS_MAX, Plan
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.plan.rules import Exhausted
from stepfs_producer.run.history.kept_plans import plan_of
from stepfs_producer.run.history.lineage import Wanted, listings_of, slices_of, standing_of
from stepfs_producer.run.history.replay import Expected, ReplayProducer
from stepfs_producer.run.load import LoadedSource
from stepfs_producer.run.pipeline import StepSink, conduct_here
from stepfs_producer.run.prepare import LocatedPlan, PreparedPlan, looked_up, tokenizer_spec
from stepfs_producer.run.results import PlanTotals, bad_records_named, callbacks_of
from stepfs_producer.run.workers.tasks import MadeStep, return_step
from stepfs_producer.sources.listing import Layout
from stepfs_producer.transforms.tokenizer import Tokenizer, load_tokenizer, pinned

KINDS: Final = (".safetensors", ".pt", ".pth", ".tar", ".npy", ".bin")
SIDES: Final = (None, "chosen", "rejected")
_PIXEL: Final = 3  # bytes, RGB
_DIMENSIONS: Final = 2  # of an array of tokens: micro-batch, token
_ENCODED: Final = {name + behind for name in (ENCODED, ENCODED_AS) for behind in ("", COUNTS)}
_WIDE: Final = 1 << 16  # a vocabulary whose ids take four bytes

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Words:
    """How ids become text. Without a tokenizer, `why` says what is missing."""

    tokenizer: Tokenizer | None = None
    why: str = ""
    plan: Plan | None = None
    files: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # names of each source's files, where they are known

    def fim(self, source: str | None) -> dict[int, str]:
        """The ids before the parts of documents whose middle comes last."""
        found = None if self.plan is None or source not in self.plan.sources else self.plan.sources[source].fim
        if self.tokenizer is None or found is None:
            return {}
        parts = zip(found.tokens, ("prefix", "middle", "suffix"), strict=True)
        return {self.tokenizer.id_of("fim", name) or 0: part for name, part in parts}

    def patch(self, column: str) -> int | None:
        """The side of the patches in a column, if its rows can be such."""
        found = None if self.plan is None else self.plan.output.columns.get(column)
        side = math.isqrt(math.prod(found.shape) // _PIXEL) if found is not None else 0
        return side if found is not None and side * side * _PIXEL == math.prod(found.shape) else None


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one kind: text; token, by its name; cut, the token that follows in another row."""

    kind: str
    text: str | None  # None: no tokenizer
    ids: Sequence[int]
    learned: bool | None  # None: the file has no labels
    section: str | None = None  # of a document whose middle comes last


@dataclass(frozen=True, slots=True)
class Document:
    """One document, or what a row has of it. `source` None: the file has no spans."""

    start: int
    tokens: int
    source: str | None
    epoch: int | None
    file: str | None
    record: int | None
    first: int | None
    side: str | None
    images: Sequence[str]
    parts: Sequence[Part]
    padding: int  # tokens behind it
    tag: str | None = None  # None: the plan has none

    @property
    def learned(self) -> int:
        return sum(len(one.ids) for one in self.parts if one.learned and one.kind != "cut")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a micro-batch; where the file does not say how long rows are, all of it."""

    rank: int | None
    micro: int
    row: int
    tokens: int
    padding: int
    documents: Sequence[Document]

    def of(self, source: str) -> Row:
        """The same with documents of this source alone."""
        return replace(self, documents=[one for one in self.documents if one.source == source])


@dataclass(frozen=True, slots=True)
class Decoded:
    """The arrays of a payload; of some kinds without labels, or spans."""

    ids: NDArray[Any]
    labels: NDArray[Any] | None
    documents: NDArray[Any] | None
    spans: NDArray[Any] | None
    sources: Sequence[str]
    length: int  # of a row
    beside: Arrays  # columns and their counts
    tags: Sequence[str] = ()  # of the spans; (): the plan has none


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows of one step, or samples of a plan."""

    words: Words
    rows: Sequence[Row]
    place: Mapping[str, object]


def rows_of(
    ext: str, payload: bytes | memoryview, what: str, words: Words, *, rank: int | None = None, micro: int = 0
) -> list[Row]:
    """The rows of a file, whose first micro-batch is `micro`.

    `UsageError` for a payload that no plan made, `CorruptError` for a damaged one.
    """
    with payloads_of_a_plan(what):
        return list(_rows(decoded(ext, payload, words), words, rank, micro))


@contextmanager
def payloads_of_a_plan(what: str) -> Iterator[None]:
    """Around what reads a payload. `UsageError` for one that no plan made, `CorruptError` for a damaged one."""
    try:
        yield
    except (NoSpansError, KeyError) as error:
        raise UsageError(f"{what}: no plan made this file; `stepfs show` shows its arrays") from error
    except UnreadablePayloadError as error:
        raise CorruptError(f"{what}: {error}") from error
    except (ValueError, IndexError, TypeError, tarfile.TarError) as error:
        raise CorruptError(f"{what}: is no file of a plan that can be read ({error})") from error


def decoded(ext: str, payload: bytes | memoryview, words: Words) -> Decoded:
    """The arrays, within `payloads_of_a_plan`."""
    kind = last_suffix(ext)
    if kind == ".bin":
        wide = words.tokenizer is not None and words.tokenizer.vocabulary > _WIDE
        ids = np.frombuffer(payload, "<u4" if wide else "<u2")[None]
        return Decoded(ids, None, None, None, (), ids.size, {})
    found = read_arrays(ext, payload)
    if kind == ".npy":
        assert found is not None
        stack = found.arrays[0].values
        if stack is None or stack.ndim != 1 + _DIMENSIONS or len(stack) != len(STACKED) or stack.dtype != np.int32:
            raise NoSpansError(kind)
        return Decoded(stack[0], stack[1], stack[3], None, (), stack.shape[2], {})
    spans = read_spans(ext, payload)
    if found is None:
        batch: dict[str, Any] = _of_tar(payload)
    else:
        batch = {one.name: one.values for one in found.arrays} | {"spans": spans.table}
        if holds_encoded(batch):  # their sizes are shown, and `grid` has these
            batch = {name: value for name, value in batch.items() if name not in _ENCODED}
        batch = expand(batch)
    length = int(str((found.facts if found is not None else {}).get("sequence_length", spans.ids.shape[1])))
    return Decoded(spans.ids, batch["labels"], batch["doc_ids"], spans.table, spans.sources, length, batch, spans.tags)


def _of_tar(payload: bytes | memoryview) -> dict[str, NDArray[Any]]:
    found: dict[str, list[NDArray[Any]]] = {}
    with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None and member.name.endswith(".npy"):
                array = np.load(io.BytesIO(file.read()), allow_pickle=False)
                found.setdefault(member.name.split(".")[1], []).append(array)
    return {name: (np.stack if name in STACKED else np.concatenate)(each) for name, each in found.items()}


def _rows(found: Decoded, words: Words, rank: int | None, micro: int) -> Iterator[Row]:
    labels, width = found.labels, found.ids.shape[1]
    shifted = labels is not None and not (labels[labels != IGNORED] == found.ids[labels != IGNORED]).all()
    spans = 0
    for number, ids in enumerate(found.ids):
        numbers = np.zeros(width, np.int32) if found.documents is None else found.documents[number]
        edges = np.union1d(np.flatnonzero(np.diff(numbers)) + 1, [*range(0, width, found.length), width])
        for row, start in enumerate(range(0, width, found.length)):
            documents: list[Document] = []
            padding = 0
            mine = edges[(edges >= start) & (edges <= start + found.length)].tolist()
            for begin, end in pairwise(mine):
                if numbers[begin] >= 0:
                    span = spans + int(numbers[begin]) if found.spans is not None else None
                    own = None if labels is None else labels[number, begin:end]
                    documents.append(_document(found, words, ids[begin:end], own, span, begin - start, shifted=shifted))
                    continue
                padding += end - begin
                if documents:
                    documents[-1] = replace(documents[-1], padding=end - begin)
            yield Row(rank, micro + number, row, found.length, padding, documents)
        spans += 0 if found.spans is None else int((found.spans[:, 0] == number).sum())


def _document(
    found: Decoded,
    words: Words,
    ids: NDArray[Any],
    labels: NDArray[Any] | None,
    span: int | None,
    start: int,
    *,
    shifted: bool,
) -> Document:
    source = epoch = file = record = first = side = None
    if span is not None and found.spans is not None:
        _, _, _, number, epoch, file_number, record, first, *pair = found.spans[span].tolist()
        source, side = found.sources[number], SIDES[pair[0] if pair else 0]
        names = words.files.get(source, ())
        file = names[file_number] if file_number < len(names) else f"#{file_number}"
    learned, following = None, None
    if labels is not None:
        learned = labels != IGNORED
        if shifted:
            following = int(labels[-1]) if learned[-1] else None
            learned = np.concatenate([[False], learned[:-1]])
    parts = list(_parts(words, ids.tolist(), learned, words.fim(source)))
    if following is not None:
        named = None if words.tokenizer is None else words.tokenizer.name_of(following)
        parts.append(Part("cut", named or _text(words, [following], None), [following], learned=True))
    images = [] if span is None else list(_images(found.beside, words, span))
    tag = found.tags[span] if found.tags and span is not None else None
    return Document(start, len(ids), source, epoch, file, record, first, side, images, parts, 0, tag)


def _parts(words: Words, ids: list[int], learned: NDArray[np.bool_] | None, fim: Mapping[int, str]) -> Iterator[Part]:
    tokenizer = words.tokenizer
    name_of: Callable[[int], str | None] = (lambda _: None) if tokenizer is None else tokenizer.name_of
    flags = [None] * len(ids) if learned is None else learned.tolist()
    names = [fim[one] if one in fim and name_of(one) is None else name_of(one) for one in ids]
    suffix_first = [fim.get(one) for one in ids[:3]]
    spm = any(pair == ("prefix", "suffix") for pair in pairwise(suffix_first))
    section, begin = None, 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and names[end] == names[begin] and flags[end] == flags[begin] and ids[end] not in fim:
            continue
        run, name = ids[begin:end], names[begin]
        if run[0] in fim:
            section = fim[run[0]]
            section = "prefix and middle" if spm and section == "middle" else section
        if name is None:
            yield Part("text", _text(words, run, ids[begin - 1] if begin else None), run, flags[begin], section)
        else:
            yield Part("token", name, run, flags[begin], section if run[0] in fim else None)
        begin = end


def _text(words: Words, ids: list[int], before: int | None) -> str | None:
    """The text of a run. A blank at its beginning stays only behind another token, as tokenizers of SentencePiece decode."""
    if words.tokenizer is None:
        return None
    if before is not None and words.tokenizer.name_of(before) is None:
        head, whole = words.tokenizer.decoded([before]), words.tokenizer.decoded([before, *ids])
        if whole.startswith(head) and not head.endswith("\ufffd"):
            return whole[len(head) :]
    return words.tokenizer.decoded(ids)


def escaped(text: str, line: str = "↵", own: str = "") -> str:
    """What moves a cursor, turns the order of letters, or is one of `own`, as Python writes it; a mark before each new line."""
    return "".join(
        one
        if one.isprintable() and one not in own
        else f"{line}\n"
        if one == "\n"
        else one.encode("unicode_escape").decode()
        for one in text
    )


def _images(beside: Arrays, words: Words, span: int) -> Iterator[str]:
    """The sizes of a span's images, of columns whose rows are patches and of one with their grids; of others how many rows."""
    counts = {name.removesuffix(COUNTS): each for name, each in beside.items() if name.endswith(COUNTS)}
    here = {name: int(each[span]) for name, each in counts.items() if each[span]}
    grids = {}
    for name, count in here.items():
        rows = beside.get(name)
        if rows is not None and rows.shape[1:] == (3,) and rows.dtype.kind in "iu":
            begin = int(counts[name][:span].sum())
            grids[name] = rows[begin : begin + count].tolist()
    for name, each in grids.items():
        sizes = {other for other, count in here.items() if count == sum(map(math.prod, each)) and other != name}
        patches = min(sizes, default=None)
        side = None if patches is None else words.patch(patches)
        if patches is None:
            continue
        here.pop(patches)
        here.pop(name)
        for _, high, wide in each:
            pixels = "" if side is None else f"{wide * side} × {high * side} pixels, "
            yield f"image {pixels}{wide} × {high} patches"
    yield from (f"{name}: {count} rows" for name, count in here.items())


async def seen_in_lake(reader: LineageReader, wanted: Wanted, directory: str, say: Callable[[str], None]) -> Seen:
    """Rows of a step, with the tokenizer that its plan names, which the lake keeps by its identity alone."""
    log, identity = reader.log, reader.log.identity
    last = log.state.next_step - 1
    if last < log.first_live_step:
        raise AbsentError(f"{log.store.url}: has no step yet")
    entry = await log.lone_entry(Step(last if wanted.step is None else wanted.step))
    placed = slices_of(identity.grid, wanted)
    producer = log.state.producers.get(entry.producer_id)
    newest = None if producer is None else read_plan_position(producer.position)
    standing = await standing_of(log, entry) or newest  # a fork lacks its parent's commits
    plan = None if standing is None else await plan_of(log, standing.digest)
    words = Words(why="no plan of it is in the lake, so its tokenizer is not known")
    if plan is not None and standing is not None:
        words = await trio.to_thread.run_sync(_words, plan, standing.tokenizer, directory)
        listings = await listings_of(log, standing, set(standing.sources), say)
        words = replace(words, files={name: [one.name for one in each.files] for name, each in listings.items()})
    rows: list[Row] = []
    async with aclosing(reader.payloads(entry, list(placed))) as payloads:
        async for index, payload in payloads:
            rank, micro = placed[index]
            what = f"step {entry.step}, slice {index}"
            rows += rows_of(identity.ext, payload, what, words, rank=rank, micro=micro)
    place = {"lake": log.store.url, "lake_id": identity.lake_id, "step": entry.step, "producer": entry.producer_id}
    return Seen(words, of_micro(rows, wanted.micro), place)


def of_micro(rows: Sequence[Row], micro: int | None) -> Sequence[Row]:
    """The rows of a micro-batch; None: all."""
    if micro is not None and not any(row.micro == micro for row in rows):
        raise UsageError(f"--micro {micro}: there are {1 + max((row.micro for row in rows), default=-1)}, from 0 on")
    return [row for row in rows if micro in (None, row.micro)]


def _words(plan: Plan, identity: str, directory: str) -> Words:
    """The tokenizer of a kept plan, if it is here and the same as then."""
    spec = tokenizer_spec(plan, directory=directory)
    try:
        tokenizer = load_tokenizer(pinned(spec))
    except AbsentError:
        why = f"the tokenizer {spec.file} is not here; --plan-dir names the directory that the plan's file was in"
        return Words(None, why, resolve(plan))
    except (MissingPackageError, RefusedError, UsageError) as error:
        return Words(None, str(error), resolve(plan))
    if identity and tokenizer.identity != identity:
        return Words(None, f"{spec.file} is another tokenizer than the one that made this step", resolve(plan))
    return Words(tokenizer, "", resolve(plan))


async def samples_of(place: LocatedPlan, source: str | None, count: int, say: Callable[[str], None]) -> Seen:
    """The first samples of each source, or of one, in the rows of a step that has as much of each; no lake is touched.

    Errors as those of a run.
    """
    prepared = await looked_up(place)
    names = sorted(prepared.rules.sources) if source is None else [source]
    rules = replace(
        prepared.rules,
        sources={name: prepared.rules.sources[name] for name in names},
        mix=MixSchedule([MixEntry(0, normalise(dict.fromkeys(names, Fraction(1)), names))]),
        ranks=1,
        micro_batches=min(count * len(names), TOKENS_MAX // prepared.rules.micro_batch_tokens),  # a row has one or more
        loads=(),
        exhausted=Exhausted.ALL,
        steps_max=None,
        tokens_max=None,
        pad_last=True,
    )
    payloads = replace(prepared.payloads, ext=".safetensors", compact=False, of_micro_batch=False)
    sources = tuple(_once(one) for one in prepared.sources if one.spec.name in names)
    made: list[bytes] = []

    async def take(_expected: Expected, step: MadeStep, _position: object) -> None:
        await trio.lowlevel.checkpoint()
        made.append(step.payloads[0])

    state = Planner(rules).begin()
    totals, one = PlanTotals(state, state), PreparedPlan(rules, payloads, sources)
    sink = StepSink(ReplayProducer({0: cast("Expected", None)}, take), return_step, None)
    with bad_records_named(totals, say):
        callbacks = callbacks_of(one, totals, lambda _totals, _held: None)
        reason = await conduct_here(one, place.directory, 1, sink, callbacks, state, steps_max=1)
    files = {each.spec.name: [file.name for file in each.layout.listing.files] for each in sources}
    plan = resolve(place.plan)
    words = Words(load_tokenizer(prepared.sources[0].transform.tokenizer), "", plan, files)
    rows = [row for payload in made for row in rows_of(payloads.ext, payload, str(place.file), words)]
    found: list[Row] = []
    for name in names:
        shown = list(_first([row.of(name) for row in rows], count))
        if not shown:
            say(f"source {name}: nothing to show of it ({reason or 'its first samples have no room in a row'})")
        found += shown
    return Seen(words, found, {"plan": str(place.file)})


def _once(one: LoadedSource) -> LoadedSource:
    """The source, of which an epoch is enough: else one without a sample would be read for ever."""
    source = one.spec.source
    spec = replace(one.spec, source=source.changed(epochs=min(source.epochs or Fraction(1), Fraction(1))))
    return LoadedSource(spec, one.transform, Layout(spec, one.layout.listing))


def _first(rows: Sequence[Row], samples: int) -> Iterator[Row]:
    """The first samples; both documents of a pair are one."""
    for row in rows:
        pairs = zip_longest(row.documents, row.documents[1:])
        goes_on = [one.side == SIDES[1] and after is not None and after.record == one.record for one, after in pairs]
        ends = [at for at, more in enumerate(goes_on, 1) if not more][:samples]
        if ends:
            yield replace(row, documents=row.documents[: ends[-1]])
            samples -= len(ends)
