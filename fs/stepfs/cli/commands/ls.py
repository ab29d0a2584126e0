"""`stepfs ls`: the mount's view without a mount."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from stepfs import interruption
from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory, opt
from stepfs.cli.target import lake_of, opened_log
from stepfs.format.ids import JSON_SCHEMA, Step
from stepfs.store.options import StoreOptions

if TYPE_CHECKING:
    from stepfs.format.records import LakeIdentity
    from stepfs.format.snapshot import StepEntry
    from stepfs.lake.log.reader import LogReader


def ls(
    target: LakeOrDirectory,
    step: Annotated[int | None, opt("--step", "List the files of this step.", "N", least=0)] = None,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """List the steps of a lake as a mount would.

    Or, with --step, the files of one step.
    """
    lake, store_options = lake_of(target, StoreOptions(endpoint_url))

    async def find() -> None:
        async with opened_log(lake, store_options, reads_only=True) as log:
            if step is not None:
                await log.entry(Step(step))  # AbsentError names the existing steps
            if as_json:
                await _print_document(log, step)
            else:
                sys.stdout.writelines(_step_names(log) if step is None else _file_names(log))

    interruption.run(find)


def _step_names(log: LogReader) -> Iterator[str]:
    from stepfs.view.naming import step_name

    for number in range(log.first_live_step, log.state.next_step):
        yield f"{step_name(Step(number)).decode()}\n"


def _file_names(log: LogReader) -> Iterator[str]:
    from stepfs.view.file_names import names_of

    names = names_of(log.identity)
    return (f"{names[place][0].decode()}\n" for place in range(len(names)))


async def _print_document(log: LogReader, only: int | None) -> None:
    """Print one JSON document step by step: a lake of 10⁶ steps is read segment by segment, never held in memory."""
    from stepfs.format.payload.schema import schema_document

    identity = log.identity
    head = {
        "schema": JSON_SCHEMA,
        "lake_id": identity.lake_id,
        "slices": identity.slices,
        "grid": identity.grid.document(),
        "ext": identity.ext,
        "payload_schema": schema_document(identity.payload_schema),
        "first_step": log.first_live_step,
        "next_step": log.state.next_step,
    }
    sys.stdout.write(json.dumps(head)[:-1] + ', "steps": [')
    first, end = (log.first_live_step, log.state.next_step) if only is None else (only, only + 1)
    for number in range(first, end):
        entry = await log.entry(Step(number))
        document = _step_document(entry)
        if only is not None:
            document["files"] = _files(entry, identity)
        sys.stdout.write((",\n" if number > first else "\n") + json.dumps(document))
    sys.stdout.write("\n]}\n")


def _files(entry: StepEntry, identity: LakeIdentity) -> list[dict[str, object]]:
    """A step's files as a mount without `--world` and `--mesh` lists them."""
    from stepfs.view.file_names import names_of

    names = names_of(identity)
    listed = ((name, entry.tgb.slice(index)) for name, index in (names[n] for n in range(len(names))))
    return [{"name": name.decode(), "size": ref.length, "crc32c": f"{ref.crc32c:08x}"} for name, ref in listed]


def _step_document(entry: StepEntry) -> dict[str, object]:
    return {
        "step": entry.step,
        "version": entry.version,
        "time": entry.time_ms / 1000,
        "producer": entry.producer_id,
        "epoch": entry.epoch,
        "bytes": entry.tgb.payload_bytes,
    }
