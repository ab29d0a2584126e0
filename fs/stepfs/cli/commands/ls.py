"""`stepfs ls`: the mount's view without a mount."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory
from stepfs.cli.target import lake_of, opened_log, view_of
from stepfs.format.ids import JSON_SCHEMA, Step
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.lake.log.reader import LogReader
    from stepfs.view.mounted import View


def ls(
    target: LakeOrDirectory,
    step: Annotated[int | None, Opt("--step", "List the files of this step.", "N", least=0)] = None,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """List the steps of a lake as a mount would, or as the mount DIR does.

    Or, with --step, the files of one step.
    """
    lake, store_options = lake_of(target, StoreOptions(endpoint_url))

    async def find() -> None:
        async with opened_log(lake, store_options, reads_only=True) as log:
            view = view_of(target, log)
            if step is not None:
                view.check(step)
                await log.entry(Step(step))
            if as_json:
                await _print_document(log, view, step)
            else:
                names = view.names(log.identity)
                files = (f"{names[place][0].decode()}\n" for place in range(len(names)))
                sys.stdout.writelines(_step_names(view) if step is None else files)

    interruption.run(find)


def _step_names(view: View) -> Iterator[str]:
    from stepfs.view.names import step_name

    for number in view.listed():
        yield f"{step_name(Step(number)).decode()}\n"


async def _print_document(log: LogReader, view: View, only: int | None) -> None:
    """Print one JSON document step by step: a lake of 10⁶ steps is read segment by segment, never held in memory."""
    identity = log.identity
    head = {
        "schema": JSON_SCHEMA,
        "lake": redact_url(log.store.url),
        "lake_id": identity.lake_id,
        "slices": identity.slices,
        "grid": identity.grid.document(),
        "ext": identity.ext,
        "first_step": view.first_visible,
        "next_step": view.next_step,
    }
    sys.stdout.write(json.dumps(head)[:-1] + ', "steps": [')
    shown, readable = view.listed(), view.readable()
    steps = range(max(shown.start, readable.start), min(shown.stop, readable.stop)) if only is None else [only]
    names = view.names(identity)
    for place, number in enumerate(steps):
        entry = await log.entry(Step(number))
        document: dict[str, object] = {
            "step": entry.step,
            "version": entry.version,
            "time": entry.time_ms / 1000,
            "producer": entry.producer_id,
            "epoch": entry.epoch,
            "bytes": entry.tgb.payload_bytes,
        }
        if only is not None:
            listed = ((name, entry.tgb.slice(index)) for name, index in (names[n] for n in range(len(names))))
            document["files"] = [
                {"name": name.decode(), "size": ref.length, "crc32c": f"{ref.crc32c:08x}"} for name, ref in listed
            ]
        sys.stdout.write((",\n" if place else "\n") + json.dumps(document))
    sys.stdout.write("\n]}\n")
