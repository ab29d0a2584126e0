"""A plan → rules for the planner, specs for loaders, settings for constructors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from pathlib import PurePosixPath
from typing import NamedTuple

from stepfs.errors import UsageError
from stepfs.format.grid import Grid
from stepfs_producer.payloads.columns import ColumnSpec
from stepfs_producer.payloads.step_task import PayloadSpec
from stepfs_producer.plan.cost import Cost
from stepfs_producer.plan.draw import MixEntry, MixSchedule, Stages, normalise
from stepfs_producer.plan.file.declared import AnySource, Jsonl, Parquet, Source, Text
from stepfs_producer.plan.file.digest import (
    micro_batch_tokens,
    mix_of,
    plan_digest,
    stages_of,
    with_defaults,
)
from stepfs_producer.plan.file.schema import Plan
from stepfs_producer.plan.file.settings import BLOCK_BYTES
from stepfs_producer.plan.rules import Exhausted, Rules, SourceRule
from stepfs_producer.sources.layout import identity_text
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.transforms.images import MODULES, library
from stepfs_producer.transforms.spec import ImagesSpec, TokenizerSpec, TransformSpec
from stepfs_producer.transforms.user import function_of


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
    specs = source_specs(plan, held_out=held_out, directory=directory)
    if held_out and not any(spec.holdout for spec in specs.values()):
        raise UsageError(
            "--holdout: no source of the plan holds records out; give one a holdout, or leave the option out"
        )
    tokenizer = tokenizer_spec(plan, directory=directory)
    transforms = {name: transform_spec(plan, source, tokenizer) for name, source in with_defaults(plan).items()}
    identity_of = {name: identity(specs[name], transform, tokenizer_digest) for name, transform in transforms.items()}
    rules = replace(_rules(plan, listings, identity_of), tokenizer=tokenizer_digest, held_out=held_out)
    return CompiledPlan(rules, specs, transforms)


def modules_of(transforms: Iterable[TransformSpec]) -> list[str]:
    """The modules of functions, and those that decode images: to be loaded before a worker's first task."""
    known = list(transforms)
    calls = {one.call.partition(":")[0] for one in known if one.call is not None}
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
    )


def grid_of(plan: Plan) -> Grid:
    output = plan.output
    micro = output.micro_batches if output.files == "micro_batches" else 1
    beside = [column.name for column in column_specs(plan) if column.own_file]
    return Grid(output.mesh.data_ranks, micro, files=("", *beside))


def column_specs(plan: Plan) -> tuple[ColumnSpec, ...]:
    """In order of names."""
    return tuple(
        ColumnSpec(name, column.dtype, column.shape, column.file == "own")
        for name, column in sorted(plan.output.columns.items())
    )


def transform_spec(plan: Plan, source: AnySource, tokenizer: TokenizerSpec) -> TransformSpec:
    """How the records of a source become samples. Only a function gives columns."""
    if source.transform is None:
        return TransformSpec(tokenizer)
    images = source.images if isinstance(source, Parquet | Source) else None
    return TransformSpec(
        tokenizer,
        source.transform,
        column_specs(plan),
        None if images is None else ImagesSpec(images.fields, images.patch, images.merge, images.patches_max),
    )


def source_specs(plan: Plan, *, held_out: bool = False, directory: str = "") -> dict[str, SourceSpec]:
    """How to find, read and order the records of each source; enough to list its files."""
    return {name: _source_spec(plan, name, source, held_out, directory) for name, source in with_defaults(plan).items()}


def tokenizer_spec(plan: Plan, *, directory: str = "") -> TokenizerSpec:
    given = plan.tokenizer
    file = None if given.file is None else _below(directory, given.file)
    return TokenizerSpec(file, given.eos, given.bos, given.pad)


def identity(spec: SourceSpec, transform: TransformSpec, tokenizer_digest: str) -> str:
    """16 hexadecimal digits: a cursor means something only while they stay.

    `tokenizer_digest`: of the content of the tokenizer's file. The source's files are not part of it, because the digest
    of the listing stands beside it; nor is policy: epochs, weights, endpoint, profile, `long`, `on_error`, padding.
    """
    tokenizer = transform.tokenizer
    parts: list[object] = [
        identity_text(spec),
        transform.call,
        tokenizer.kind,
        tokenizer.eos,
        tokenizer.bos,
        tokenizer_digest,
    ]
    if transform.columns:
        parts.append([[column.name, column.dtype, column.shape] for column in transform.columns])
    if transform.images is not None:
        parts.append([*astuple(transform.images), library()])
    text = json.dumps(parts, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"stepfs-source").hexdigest()


def schedule_of(plan: Plan) -> MixSchedule:
    """Shares of the sources by step, in order of names."""
    names = sorted(plan.sources)
    return MixSchedule(
        [
            MixEntry(entry.ramp_to, normalise(entry.weights, names), ramp=True)
            if entry.ramp_to is not None
            else MixEntry(entry.from_ or 0, normalise(entry.weights, names))
            for entry in mix_of(plan)
        ]
    )


def _rules(plan: Plan, listings: Mapping[str, str], identity_of: Mapping[str, str]) -> Rules:
    stages = stages_of(plan)
    return Rules(
        digest=plan_digest(plan),
        sources={
            name: SourceRule(identity_of[name], listings.get(name, ""), source.long, source.on_error.budget)
            for name, source in with_defaults(plan).items()
        },
        mix=schedule_of(plan),
        stages=Stages(
            {stage.from_: stage.sequence_length for stage in stages},
            {stage.from_: stage.lengths for stage in stages},
        ),
        ranks=plan.output.mesh.data_ranks,
        micro_batches=plan.output.micro_batches,
        micro_batch_tokens=micro_batch_tokens(plan),
        packing=plan.pack.method,
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


def _cost(plan: Plan) -> Cost:
    if plan.cost.call is not None:
        return Cost(call=function_of(plan.cost.call))
    return Cost(*plan.cost.coefficients, prices=tuple(sorted(plan.cost.columns.items())))


def _source_spec(plan: Plan, name: str, source: AnySource, held_out: bool, directory: str) -> SourceSpec:
    parquet = source if isinstance(source, Parquet) else None
    has_text = isinstance(source, Jsonl | Parquet | Source)
    return SourceSpec(
        name=name,
        format=source.format,
        files=tuple(_below(directory, file) for file in source.files),
        seed=plan.seed,
        records=source.records if isinstance(source, Text) else "lines",
        text_field=source.text_field if isinstance(source, Jsonl | Parquet | Source) else "text",
        tokens_field=parquet.tokens_field if parquet else None,
        mask_field=parquet.mask_field if parquet else None,
        labels_field=parquet.labels_field if parquet else None,
        whole_records=has_text and source.transform is not None,
        shuffle=source.shuffle is not None,
        block_bytes=BLOCK_BYTES if source.shuffle is None else source.shuffle.block,
        epochs=source.epochs,
        holdout=source.holdout,
        held_out=held_out,
        shard=source.shard or (0, 1),
        endpoint_url=source.endpoint_url,
        profile=source.profile,
        version=source.version,
        options=dict(source.options) if isinstance(source, Source) else {},
    )


def _below(directory: str, name: str) -> str:
    name = os.path.expanduser(name)  # noqa: PTH111  (a user that there is not stays a name)
    return name if not directory or "://" in name else str(PurePosixPath(directory) / name)
