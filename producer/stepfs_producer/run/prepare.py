"""A plan made ready to run: compiled, its files listed, held against the lake."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import trio

from stepfs._internal.image_patches import MODULES
from stepfs.errors import AbsentError, CorruptError, MissingPackageError, RefusedError, UsageError
from stepfs.format.grid import Grid
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import POSITION_BYTES_MAX, Epoch
from stepfs.format.keys import plan_key
from stepfs.format.planned import Listing
from stepfs.lake.identity import check_writable
from stepfs.lake.kept_plans import kept_listing, kept_plan
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store
from stepfs.store.listed import ADVICE
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.payloads.step import ColumnSpec, PayloadSpec
from stepfs_producer.plan.cost import CostModel
from stepfs_producer.plan.file.digest import (
    PlanChangedError,
    differences,
    normalised,
    plan_digest,
    plan_of_text,
    plan_text,
)
from stepfs_producer.plan.file.yaml_file import PlanFile, read_plan
from stepfs_producer.plan.mix import MixEntry, MixSchedule, Stages, normalise
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.planner import REVISION, Planner
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.plan.rules import Exhausted, Rules, SourceRule
from stepfs_producer.plan.sources import PIXELS, Chat, Long
from stepfs_producer.plan.step import SourceState, State, position_bytes_max, read_position
from stepfs_producer.plan.values import parse_shard
from stepfs_producer.run.identity import identity, revised
from stepfs_producer.run.lake import committed_positions, keep, keep_listing, kept_libraries, libraries
from stepfs_producer.run.load import LoadedSource
from stepfs_producer.run.options import RunOptions
from stepfs_producer.sources.holdout import with_documents
from stepfs_producer.sources.hub import advice_on, with_commits
from stepfs_producer.sources.listing import (
    Layout,
    accepted,
    added,
    begun_block,
    common,
    continued_at,
    list_corpus,
    located,
)
from stepfs_producer.sources.reading import block_crc32c, read_block
from stepfs_producer.sources.record import BlockTask, SourceSpec
from stepfs_producer.transforms.documents import ChatSpec, TokenizerSpec, TransformSpec
from stepfs_producer.transforms.model_folder import require_image_rule, special_tokens, templates_of
from stepfs_producer.transforms.records import open_transform
from stepfs_producer.transforms.tokenizer import load_tokenizer, pinned
from stepfs_producer.transforms.user_function import function_of

_NAMED_MAX: Final = 5  # files in a line
_LISTED_AT_ONCE: Final = 16


class CompiledPlan(NamedTuple):
    """A plan in the terms of the rooms below. Mappings are in order of the sources' names."""

    rules: Rules
    specs: Mapping[str, SourceSpec]
    transforms: Mapping[str, TransformSpec]


def compile_plan(
    plan: Plan,
    *,
    listings: Mapping[str, str],
    tokenizer_digest: str,
    held_out: bool = False,
    directory: str = "",
) -> CompiledPlan:
    """`plan` with digests of its sources' listings and of its tokenizer's file.

    Relative names of files are below `directory`, the one that holds the plan. `UsageError` for a cost function that
    cannot be imported, and for `held_out` where nothing is.
    """
    plan = resolve(plan)
    specs = source_specs(plan, held_out=held_out, directory=directory)
    if held_out and not any(source.holdout for source in plan.sources.values()):
        raise UsageError(
            "--holdout: no source of the plan holds records out; give one a holdout, or leave the option out"
        )
    tokenizer = tokenizer_spec(plan, directory=directory)
    transforms = {name: transform_spec(plan, name, tokenizer, directory=directory) for name in plan.sources}
    identity_of = {name: identity(specs[name], one, tokenizer_digest) for name, one in transforms.items()}
    rules = replace(_rules(plan, listings, identity_of), tokenizer=tokenizer_digest, held_out=held_out)
    return CompiledPlan(rules, specs, transforms)


def modules_of(transforms: Iterable[TransformSpec]) -> list[str]:
    """The modules of functions, and those that decode images: to be loaded before a worker's first task."""
    known = [one.source for one in transforms]
    calls = {one.transform.partition(":")[0] for one in known if one.transform is not None}
    return [*sorted(calls), *(MODULES if any(one.images is not None for one in known) else ())]


def payload_spec(plan: Plan, *, padding: int, vocabulary: int) -> PayloadSpec:
    """How payloads are written, with ids of the loaded tokenizer."""
    output = plan.output
    return PayloadSpec(
        output.ext,
        output.labels == "shifted",
        padding,
        vocabulary,
        output.files == "micro_batches",
        column_specs(plan),
        any(source.pair is not None for source in plan.sources.values()),
        output.arrays == "compact",
        plan.align,
        any(source.tag is not None for source in plan.sources.values()),
    )


def grid_of(plan: Plan) -> Grid:
    output = plan.output
    micro = output.micro_batches if output.files == "micro_batches" else 1
    beside = [column.name for column in column_specs(plan) if column.own_file]
    return Grid(output.mesh.data_ranks, micro, files=("", *beside))


def column_specs(plan: Plan) -> tuple[ColumnSpec, ...]:
    """The specs of columns, in order of names."""
    encoded = {name: column for source in plan.sources.values() for name, column in source.encoded_columns.items()}
    found = plan.output.columns | encoded
    return tuple(ColumnSpec(name, found[name], bool(encoded) and name == PIXELS) for name in sorted(found))


def transform_spec(plan: Plan, name: str, tokenizer: TokenizerSpec, *, directory: str) -> TransformSpec:
    """How the records of a source become samples. `plan`: resolved.

    `UsageError`, `AbsentError` for a chat template that cannot be read.
    """
    source = plan.sources[name]
    columns = column_specs(plan) if source.gives_columns else ()
    shortest = _shortest(plan, name)
    if source.chat is None:
        return TransformSpec(source, tokenizer, columns, tokens_max=shortest)
    chat = _chat_spec(source.chat, tokenizer, directory)
    if source.images is not None:
        require_image_rule(tokenizer.tokenizer, source.images)
        chat = replace(chat, images=source.images)
    if source.pair is None and source.long is not Long.DROP:
        chat = replace(chat, tokens_max=shortest, truncates=source.long is Long.TRUNCATE)
    return TransformSpec(source, tokenizer, columns, chat, shortest)


def _shortest(plan: Plan, name: str) -> int:
    """The least that a document of a source may have, of all stages of a resolved plan."""
    return min(stage.lengths.get(name, stage.sequence_length) for stage in plan.stages)


def _chat_spec(chat: Chat, tokenizer: TokenizerSpec, directory: str) -> ChatSpec:
    if find_spec("jinja2") is None:
        raise MissingPackageError(
            "chats need the package jinja2, which is not installed: pip install 'stepfs[produce]'"
        )
    from stepfs_producer.transforms.template import Rendering  # noqa: PLC0415 - optional

    templates = templates_of(tokenizer.tokenizer, lambda name: _below(directory, name))
    found = ChatSpec(chat, templates, special_tokens(tokenizer.tokenizer))
    Rendering(found)  # a template that is none is no record's fault
    return found


def source_specs(plan: Plan, *, held_out: bool = False, directory: str = "") -> dict[str, SourceSpec]:
    """How to find, read and order the records of each source; enough to list its files."""
    return {
        name: SourceSpec(
            name,
            source.changed(files=tuple(_below(directory, file) for file in source.files)),
            plan.seed,
            held_out,
            exclude=tuple(one for one in plan.exclude if isinstance(one, str) or one[0] == name),
        )
        for name, source in resolve(plan).sources.items()
    }


def tokenizer_spec(plan: Plan, *, directory: str = "") -> TokenizerSpec:
    """The tokenizer, not pinned to the content of its file."""
    found = plan.tokenizer
    return TokenizerSpec(found if found.file is None else found.changed(file=_below(directory, found.file)))


def schedule_of(plan: Plan) -> MixSchedule:
    """Shares of the sources by step, in order of names."""
    names = sorted(plan.sources)
    return MixSchedule(
        [
            MixEntry(entry.ramp_to, normalise(entry.weights, names), ramp=True)
            if entry.ramp_to is not None
            else MixEntry(entry.from_ or 0, normalise(entry.weights, names))
            for entry in resolve(plan).mix
        ]
    )


def _rules(plan: Plan, listings: Mapping[str, str], identity_of: Mapping[str, str]) -> Rules:
    return Rules(
        digest=plan_digest(plan),
        sources={
            name: SourceRule(
                identity_of[name],
                listings.get(name, ""),
                # Chats are cut by turns before the planner sees them; what is still too long is dropped.
                Long.DROP if source.is_of_chats else source.long,
                source.on_error.budget,
                pairs=source.pair is not None and source.pair.label is None,
            )
            for name, source in plan.sources.items()
        },
        mix=schedule_of(plan),
        stages=Stages(
            {stage.from_: stage.sequence_length for stage in plan.stages},
            {stage.from_: stage.lengths for stage in plan.stages},
        ),
        ranks=plan.output.mesh.data_ranks,
        micro_batches=plan.output.micro_batches,
        micro_batch_tokens=plan.micro_batch_tokens,
        packing=plan.pack.method,
        align=plan.align,
        cost=_cost(plan),
        columns=tuple(column.name for column in column_specs(plan)),
        loads=plan.balance.loads,
        method=plan.balance.method,
        over=plan.balance.over,
        exhausted=plan.until.exhausted or Exhausted.ALL,
        steps_max=plan.until.steps,
        tokens_max=plan.until.tokens,
        pad_last=plan.until.last == "pad",
    )


def _cost(plan: Plan) -> CostModel:
    if plan.cost.call is not None:
        return CostModel(call=function_of(plan.cost.call))
    return CostModel(*plan.cost.coefficients, prices=tuple(sorted(plan.cost.columns.items())))


def _below(directory: str, name: str) -> str:
    name = os.path.expanduser(name)  # noqa: PTH111  (a user that there is not stays a name)
    return name if not directory or "://" in name else str(PurePosixPath(directory) / name)


@dataclass(frozen=True, slots=True)
class LocatedPlan:
    """A plan, the directory of its file, and the side of holdout to produce."""

    plan: Plan
    directory: str = ""  # that relative names of files are below
    held_out: bool = False  # produce the records that the plan holds out
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """A plan that fits its lake and its sources."""

    rules: Rules
    payloads: PayloadSpec
    sources: tuple[LoadedSource, ...]  # in order of names

    @property
    def digest(self) -> str:
        """The digest of the plan."""
        return self.rules.digest

    @property
    def listings(self) -> dict[str, Listing]:
        return {one.spec.name: one.layout.listing for one in self.sources}

    @property
    def modules(self) -> list[str]:
        """The modules to load before a worker's first task."""
        return modules_of(one.transform for one in self.sources)


def plan_file_at(path: Path, *, sources: bool = True) -> PlanFile:
    """The plan in a file. `PlanError` has a line for every mistake; `AbsentError`, `RefusedError`: it cannot be read."""
    try:
        found = read_plan(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such file; name the YAML file of a plan") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; name a readable YAML file") from error
    return replace(found, plan=with_documents(with_commits(found.plan) if sources else found.plan, str(path.parent)))


def plan_at(path: Path, *, held_out: bool = False) -> LocatedPlan:
    """The plan in a file; relative names in it are below the file's directory."""
    return LocatedPlan(plan_file_at(path).plan, str(path.parent), held_out, path)


async def list_sources(place: LocatedPlan) -> dict[str, Listing]:
    found: dict[str, Listing] = {}
    limiter = trio.CapacityLimiter(_LISTED_AT_ONCE)

    async def look(spec: SourceSpec) -> None:
        try:
            found[spec.name] = await trio.to_thread.run_sync(list_corpus, spec, limiter=limiter, abandon_on_cancel=True)
        except OSError as error:
            raise _unreadable(spec, error) from error

    async with trio.open_nursery() as nursery:
        specs = source_specs(place.plan, held_out=place.held_out, directory=place.directory)
        for spec in specs.values():
            nursery.start_soon(look, spec)
    return found


def _unreadable(spec: SourceSpec, error: OSError) -> RefusedError:
    what = f"{error.filename or spec.source.files[0]}: {error.strerror or error}"
    return RefusedError(f"source {spec.name}: {what}; make its files readable")


def prepare_plan(place: LocatedPlan, listings: Mapping[str, Listing]) -> PreparedPlan:
    """A plan with the listings of its sources. `UsageError` for a mistake that concerns no lake."""
    # Pinned: workers refuse a file replaced meanwhile.
    spec = pinned(tokenizer_spec(place.plan, directory=place.directory))
    tokenizer = load_tokenizer(spec)
    found = compile_plan(
        place.plan,
        listings={name: listing.digest for name, listing in listings.items()},
        tokenizer_digest=tokenizer.identity,  # more than the file's: it names the tokens that end documents, too
        held_out=place.held_out,
        directory=place.directory,
    )
    for transform in found.transforms.values():
        open_transform(replace(transform, tokenizer=spec), tokenizer)  # a token that is not there is no record's fault
    _refuse_large_position(Planner(found.rules).begin(), place.plan)
    sources = tuple(
        LoadedSource(
            found.specs[name],
            replace(transform, tokenizer=spec),
            Layout(found.specs[name], listings[name]),
        )
        for name, transform in sorted(found.transforms.items())
    )
    payloads = payload_spec(place.plan, padding=tokenizer.pad, vocabulary=tokenizer.vocabulary)
    return PreparedPlan(found.rules, payloads, sources)


async def fit_plan(
    store: Store,
    identity: LakeIdentity,
    place: LocatedPlan,
    prepared: PreparedPlan,
    position: object,
    *,
    accept_changes: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> PreparedPlan:
    """Fit a plan to its lake, where this producer id is at `position` (None: it has not begun). `prepared`: its files are
    those of now; a source that began with another listing keeps that one.

    Writes nothing. `RefusedError` for another pipeline's position, a source that changed, and a plan or a file that changed
    unless that is accepted: the message shows the changes, or `say` names the files.
    """
    state = None if position is None else read_position(position)
    if state is not None:
        _refuse_other_side(state, place, "this producer id")
        await _refuse_changes(store, identity, place.plan, state, accepted=accept_changes)
    known = {} if state is None else state.sources
    frozen: dict[str, Listing] = {}
    cursors: dict[str, tuple[int, ...]] = {}
    then = None if state is None else await _plan_then(store, identity, state.plan)
    if state is not None and then is not None:
        rules = revised(prepared.rules, prepared.sources, state, then, place.plan, accept=accept_changes, say=say)
        prepared = replace(prepared, rules=rules)
    for one in prepared.sources:
        name, now = one.spec.name, one.layout.listing
        if name in known and known[name].listing != now.digest:
            before = await _listing_then(store, identity, name, known[name].listing)
            if not accept_changes:
                located(before, now, name, advice=advice_on(then, name))
            frozen[name], cursor = _fit_listing(one.spec, before, now, known[name].cursor, say=say)
            if cursor is not None:
                cursors[name] = cursor
    found = await trio.to_thread.run_sync(with_listings, prepared, frozen, cursors, abandon_on_cancel=True)
    begun = {name: was for name, was in known.items() if cursors.get(name, was.cursor) == was.cursor and was.begun}
    edited = await trio.to_thread.run_sync(_edited, found, begun, abandon_on_cancel=True)
    for name, task in edited.items():
        what = f"source {name}: {_files_of(task, found.listings[name])}: read otherwise than when this plan began a block of them"
        if not accept_changes:
            raise RefusedError(f"{what}; {ADVICE}")
        say(f"warning: {what}; the rest of the block is left out")
    found = with_listings(found, {}, {name: (*task.next_fragment, 0, 0) for name, task in edited.items()})
    recut = await trio.to_thread.run_sync(_recut, found, known, then, place.plan, abandon_on_cancel=True)
    for name in recut:
        say(f"warning: source {name}: the rest of the record that was begun is left out: it is cut otherwise now")
    found = with_listings(found, {}, recut)
    _refuse_large_position(Planner(found.rules).begin(state), place.plan)
    return found


async def _listing_then(store: Store, identity: LakeIdentity, name: str, digest: str) -> Listing:
    then = await kept_listing(store, identity.lake_id, digest)
    if then is None:
        raise RefusedError(
            f"source {name}: its files are not those of before, and the list of those is not in the lake; restore the objects "
            f"sources/{digest}/, or give the source of a plan a new name to begin it anew"
        )
    return then


def _fit_listing(
    spec: SourceSpec, then: Listing, now: Listing, cursor: tuple[int, ...], *, say: Callable[[str], None]
) -> tuple[Listing, tuple[int, ...] | None]:
    """The listing of before with the files of now, which are accepted, and where to go on in it if some changed."""
    fitted, lines = accepted(then, now)
    more = added(then, now)
    if more:
        say(
            f"warning: source {spec.name}: {_named(more)} came after it began, and {'is' if len(more) == 1 else 'are'} not read; "
            "name such files in a source of their own"
        )
    for line in lines:
        say(f"warning: source {spec.name}: {line}")
    if not lines:
        return fitted, None
    there = continued_at(spec, then, fitted, cursor)
    block = begun_block(spec, then, cursor)
    if block is not None and there != cursor:
        rest = sum(fragment.end - fragment.begin for fragment in block.fragments)
        say(
            f"warning: source {spec.name}: the rest of the block that was begun, at most {rest} bytes of "
            f"{_files_of(block, then)}, is left out"
        )
    return fitted, there


def _edited(prepared: PreparedPlan, begun: Mapping[str, SourceState]) -> dict[str, BlockTask]:
    """The begun blocks whose files were edited in place, with their old size: a cursor counts other records there now."""
    found = {}
    for one in prepared.sources:
        was = begun.get(one.spec.name)
        rule = prepared.rules.sources[one.spec.name]
        if was is None or was.identity not in (rule.identity, rule.accepted):
            continue  # another source, which is refused by its name
        task = one.layout.task(BlockAddress(*was.cursor[:3]))
        try:
            if task is not None and block_crc32c(one.spec, task) != was.begun:
                found[one.spec.name] = task
        except OSError as error:
            raise _unreadable(one.spec, error) from error
    return found


async def _plan_then(store: Store, identity: LakeIdentity, digest: str) -> Plan | None:
    """None if it cannot be read any more."""
    try:
        text = await kept_plan(store, identity.lake_id, digest)
        return None if text is None else plan_of_text(text)
    except (CorruptError, RefusedError):
        return None


def _recut(
    prepared: PreparedPlan, known: Mapping[str, SourceState], then: Plan | None, now: Plan
) -> dict[str, tuple[int, ...]]:
    """Where sources go on behind a begun record whose documents were others, because stages or `long` changed."""
    found: dict[str, tuple[int, ...]] = {}
    for one in prepared.sources:
        name, source = one.spec.name, one.spec.source
        was, cursor = known.get(name), prepared.rules.sources[name].cursor
        if was is None or not was.into or not (source.chat or source.fim) or (cursor or was.cursor) != was.cursor:
            continue
        if then is not None and _cut_at(then, name) == _cut_at(now, name):
            continue
        task = one.layout.task(BlockAddress(*was.cursor[:3]))
        if task is not None:
            block = read_block(one.spec, task)
            ends = was.taken + 1 == len(block.records)
            found[name] = (*block.follows, 0, 0) if ends else (*task.place, was.taken + 1, 0)
    return found


def _cut_at(plan: Plan, name: str) -> tuple[int, Long] | None:
    plan = resolve(plan)
    return (_shortest(plan, name), plan.sources[name].long) if name in plan.sources else None


def _files_of(task: BlockTask, listing: Listing) -> str:
    return _named(sorted({listing.files[fragment.file].name for fragment in task.fragments}))


def _named(files: Sequence[str]) -> str:
    return ", ".join(files[:_NAMED_MAX]) + f" and {len(files) - _NAMED_MAX} more" * (len(files) > _NAMED_MAX)


def with_listings(
    prepared: PreparedPlan, listings: Mapping[str, Listing], cursors: Mapping[str, tuple[int, ...]]
) -> PreparedPlan:
    """The plan with other listings of these sources, and where to go on in them; nothing else is prepared again."""
    rules = dict(prepared.rules.sources)
    rules |= {name: replace(rules[name], listing=listing.digest) for name, listing in listings.items()}
    rules |= {name: replace(rules[name], cursor=cursor) for name, cursor in cursors.items()}
    sources = tuple(
        replace(one, layout=Layout(one.spec, listings[one.spec.name])) if one.spec.name in listings else one
        for one in prepared.sources
    )
    return replace(prepared, rules=replace(prepared.rules, sources=rules), sources=sources)


async def keep_plan(store: Store, identity: LakeIdentity, place: LocatedPlan, prepared: PreparedPlan) -> None:
    """Keep what positions of a fitted plan name: its text, and the listings of its sources."""
    for listing in prepared.listings.values():
        await keep_listing(store, identity.lake_id, listing)
    await keep(store, plan_key(identity.lake_id, prepared.digest), plan_text(place.plan).encode())


def _refuse_other_files(identity: LakeIdentity, url: str, place: LocatedPlan) -> None:
    """`RefusedError` if the lake has another grid or another extension."""
    grid, output = grid_of(place.plan), place.plan.output
    if identity.grid != grid:
        raise RefusedError(
            f"{url} has {identity.grid} per step, not {grid}; name another lake{_way_to(identity.grid, grid)}"
        )
    if identity.ext != output.ext:
        raise RefusedError(
            f"{url} holds {identity.ext} files, not {output.ext}; name another lake, or set output.ext to {identity.ext}"
        )


async def refuse_unfit(
    store: Store,
    identity: LakeIdentity,
    place: LocatedPlan,
    prepared: PreparedPlan,
    *,
    options: RunOptions,
    say: Callable[[str], None],
) -> tuple[object, bool]:
    """The position of this producer id, None if it has not begun, and whether the lake is sealed.

    `RefusedError` if the lake is not one for the plan.
    """
    check_writable(identity, store.url)
    _refuse_other_files(identity, store.url, place)
    log = await LogReader.open(store, identity)
    positions = committed_positions(log)
    begun = {}
    for producer_id, position in sorted(positions.items()):
        with suppress(RefusedError):  # of another pipeline
            state = read_position(position)
            begun[producer_id] = state, await _kept_settings(store, identity, state.plan)
    mine = positions.get(options.producer_id)
    if mine is None:  # what has begun was accepted, and `fit_plan` compares it
        _refuse_other_producers(begun, place, prepared, options, say)
    for producer_id, (state, settings) in begun.items():
        _refuse_other_arrays(settings, place.plan, f"{store.url}: producer {producer_id}", options)
        if mine is None and options.fixed_shape:
            await _refuse_repeats(store, identity.lake_id, producer_id, _shards(settings, state), prepared)
    if options.producer_id in begun:
        state, epoch = begun[options.producer_id][0], log.state.producers[options.producer_id].epoch
        _refuse_other_versions(
            state, await _decoder_then(store, identity, state, epoch, prepared, options), options, say
        )
    return mine, log.state.sealed


async def _decoder_then(
    store: Store, identity: LakeIdentity, state: State, epoch: Epoch, prepared: PreparedPlan, options: RunOptions
) -> str | None:
    """The version of Pillow that has decoded this producer's images; None if it has none, or nobody knows."""
    if all(one.spec.source.images is None for one in prepared.sources):
        return None
    kept = await kept_libraries(store, identity.lake_id, state.plan, options.producer_id, epoch)
    return kept.get("pillow")


def _refuse_other_versions(state: State, decoder: str | None, options: RunOptions, say: Callable[[str], None]) -> None:
    """`RefusedError` where the same plan would make other steps from here on than another version of the planner, or of the
    library that decodes images, would; unless that is accepted.
    """
    here = libraries()["pillow"] if decoder else None
    changes = [f"the planner is revision {REVISION}, and was {state.revision}"] if state.revision != REVISION else []
    changes += [f"images are decoded by pillow {here}, and were by {decoder}"] if decoder != here else []
    if changes:
        line = f"since step {state.step} {' and '.join(changes)}"
        if not options.accept_changes:
            raise RefusedError(
                f"{line}: steps may differ from those of before; add --accept-changes to go on with that"
            )
        say(f"warning: {line}")


async def _kept_settings(store: Store, identity: LakeIdentity, digest: str) -> dict[str, Any]:
    """A plan of the lake as it was normalised; empty if it is not there, or damaged."""
    try:
        found = json.loads(await kept_plan(store, identity.lake_id, digest) or "{}")
    except (RefusedError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refuse_other_arrays(settings: Mapping[str, Any], plan: Plan, whose: str, options: RunOptions) -> None:
    """`RefusedError` unless files of both plans have the same columns and, of `text`, the same rows."""
    if not isinstance(theirs := settings.get("output"), dict):
        return
    ours = normalised(plan)["output"]
    theirs_have, ours_have = (_columns_text(output.get("columns")) for output in (theirs, ours))
    remedy = "name another lake"
    if options.fixed_shape and theirs_have == ours_have:
        remedy = (
            f"give --batch-size {theirs.get('micro_batches')} --seq-len {theirs.get('micro_batch_tokens')}, or {remedy}"
        )
        theirs_have, ours_have = (
            f"rows [{output.get('micro_batches')}, {output.get('micro_batch_tokens')}]" for output in (theirs, ours)
        )
    if theirs_have != ours_have:
        raise RefusedError(f"{whose} has made files with {theirs_have}, and this plan makes {ours_have}; {remedy}")


def _columns_text(columns: object) -> str:
    return "the columns " + json.dumps(columns, sort_keys=True) if columns else "no columns"


def _refuse_other_producers(
    others: Mapping[str, tuple[State, Mapping[str, Any]]],
    place: LocatedPlan,
    prepared: PreparedPlan,
    options: RunOptions,
    say: Callable[[str], None],
) -> None:
    """`RefusedError` if a producer that has not begun would not go on with what others (id → state, plan) have begun.

    That is another side of the holdout, the files of a source dealt to another number of shards, or, unless that is
    accepted, another tokenizer.
    """
    specs = {prepared.rules.sources[one.spec.name].listing: one.spec for one in prepared.sources}
    mine = prepared.rules.tokenizer
    for producer_id, (state, settings) in others.items():
        _refuse_other_side(state, place, f"producer {producer_id}")
        _refuse_other_shards(settings, producer_id, state, specs)
        if state.tokenizer and state.tokenizer != mine:
            difference = f"the tokenizer of producer {producer_id} is {state.tokenizer}, and this plan's is {mine}"
            if not options.accept_changes:
                also = "or add --accept-changes to mix their ids for good"
                raise RefusedError(f"{options.lake}: {difference}; name another lake, {also}")
            say(f"warning: {difference}")


def _refuse_other_shards(
    settings: Mapping[str, Any], producer_id: str, state: State, specs: Mapping[str, SourceSpec]
) -> None:
    """`specs`: by the digests of their listings."""
    for index, count, listing in _shards(settings, state):
        spec = specs.get(listing)
        if spec is not None and count != spec.source.dealt.of:
            mine = spec.source.dealt
            raise RefusedError(
                f"producer {producer_id} has produced shard {index}/{count} of these files, not {mine}: that would commit "
                f"the same records again; continue with shard {index}/{count} and the others of it, or produce into "
                "another lake"
            )


def _shards(settings: Mapping[str, Any], state: State) -> Iterator[tuple[int, int, str]]:
    """Index, count and listing of each source that a producer with this plan has begun."""
    theirs = settings.get("sources")
    if isinstance(theirs, dict):
        for name in state.sources.keys() & theirs.keys():
            yield *parse_shard(theirs[name].get("shard", "0/1")), state.sources[name].listing


async def _refuse_repeats(
    store: Store, lake_id: str, producer_id: str, begun: Iterable[tuple[int, int, str]], prepared: PreparedPlan
) -> None:
    """`RefusedError` for files that another producer reads already: `text` takes each record once."""
    (text,) = prepared.sources
    for index, count, digest in begun:
        mine = text.spec.source.dealt
        if count == mine.of and index != mine.number:
            continue
        listing = await kept_listing(store, lake_id, digest)
        if listing is not None and (both := common(listing, text.layout.listing)):
            raise RefusedError(f"producer {producer_id} reads {_named(both)} too; continue that, or leave them out")


def _refuse_other_side(state: State, place: LocatedPlan, whose: str) -> None:
    """`RefusedError`: one lake holds one side of the holdout, for records held out must not reach training."""
    if state.held_out != place.held_out:
        here, other = ("with", "without") if place.held_out else ("without", "with")
        raise RefusedError(
            f"{whose} has produced into this lake {other} --holdout, and this run is {here} it: the records of one side would be "
            f"among those of the other; name a lake of its own for each side"
        )


def _way_to(grid: Grid, planned: Grid) -> str:
    """Changes of the plan that would give this grid; none for one that no plan has."""
    if grid != Grid(grid.ranks, grid.micro):
        return ""
    mesh = [f"output.mesh to one with dp = {grid.ranks}"] if grid.ranks != planned.ranks else []
    files = f"micro_batches to {grid.micro} and files to micro_batches" if grid.micro > 1 else "files to ranks"
    return ", or set " + ", ".join([*mesh, *([f"output.{files}"] if grid.micro != planned.micro else [])])


def _refuse_large_position(state: State, plan: Plan) -> None:
    """Hazard P9: a position that outgrows a commit would end the run months from now."""
    counting = [name for name, source in plan.sources.items() if plan.exclude or source.fim is not None]
    bytes_max = position_bytes_max(state, growing=plan.sources.keys(), counting=counting)
    if bytes_max > POSITION_BYTES_MAX:
        former = len(state.sources) - len(plan.sources)
        raise UsageError(
            f"the position of {len(state.sources)} sources"
            + (f", {former} of them no longer in the plan," if former else "")
            + f" can reach {bytes_max} bytes, and a commit holds {POSITION_BYTES_MAX}; join sources that have the same weight, "
            "or shorten their names" + (", in a new lake" if former else "")
        )


async def looked_up(place: LocatedPlan) -> PreparedPlan:
    """The plan with its sources as they are now."""
    find_modules_in(place.directory)
    return await trio.to_thread.run_sync(prepare_plan, place, await list_sources(place), abandon_on_cancel=True)


async def _refuse_changes(store: Store, identity: LakeIdentity, plan: Plan, state: State, *, accepted: bool) -> None:
    if accepted or plan_digest(plan) == state.plan:
        return
    then = await _plan_then(store, identity, state.plan)  # with the defaults of keys that it did not know yet
    before = await _kept_settings(store, identity, state.plan) if then is None else normalised(then)
    changes = ["the plan of the steps so far is not in the lake, or damaged, so the changes cannot be shown"]
    if before and not (changes := differences(before, normalised(plan))):
        return
    raise PlanChangedError(
        f"the plan changed since step {state.step}:\n  "
        + "\n  ".join(changes)
        + "\nadd --accept-changes to go on with it from that step on"
    )
