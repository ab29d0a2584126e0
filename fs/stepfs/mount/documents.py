"""The documents of `.stepfs/`: plain dictionaries, each rendered as one JSON document."""

from __future__ import annotations

import base64
import json
from typing import cast

from stepfs.format.codec import Value, unpack
from stepfs.format.ids import JSON_SCHEMA, SliceIndex
from stepfs.format.planned import read_plan_position
from stepfs.format.snapshot import LogState, StepEntry
from stepfs.lake.planned import commit_of
from stepfs.store.api import Store

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def render(document: Json) -> str:
    """One document, readable by people. A path's bytes that are not UTF-8 become `\\udc..`, as `os.fsdecode` has them."""
    return json.dumps(document, indent=2, ensure_ascii=False).encode(errors="backslashreplace").decode() + "\n"


async def describe_step(store: Store, lake_id: str, state: LogState, entry: StepEntry) -> str:
    """`steps/<step>.json`. The producer's position costs one GET; null once that log version was reclaimed."""
    commit = await commit_of(store, lake_id, entry.version)
    packed = b"" if commit is None else commit.position
    tgb = entry.tgb
    slices: list[Json] = []
    for number in range(tgb.slices):
        ref = tgb.slice(SliceIndex(number))
        slices.append(
            {
                "slice": number,
                "offset": ref.offset,
                "length": ref.length,
                "crc32c": f"{ref.crc32c:08x}",
                "records": ref.records,
            }
        )
    return render(
        {
            "schema": JSON_SCHEMA,
            "step": entry.step,
            "producer": entry.producer_id,
            "epoch": entry.epoch,
            "version": entry.version,
            "time": entry.time_ms / 1000,
            "object": tgb.key,
            "origin": state.origins[tgb.origin - 1].url if tgb.origin else None,
            "size": tgb.size,
            "slices": slices,
            "plan": _describe_plan(packed),
            "position": to_json(unpack(packed, f"step {entry.step}")) if packed else None,
        }
    )


def describe_producers(state: LogState) -> Json:
    """Every producer that ever committed, by id; `plan` comes from its position if `stepfs-produce run` wrote it."""
    return {
        producer.producer_id: {
            "epoch": producer.epoch,
            "next_seq": producer.next_seq,
            "version": producer.version,
            "time": producer.time_ms / 1000,
            "retired": producer.retired,
            "plan": _describe_plan(producer.position),
        }
        for producer in state.producers.values()
    }


def _describe_plan(position: bytes) -> Json:
    standing = read_plan_position(position)
    return None if standing is None else cast("Json", standing.document())


def to_json(value: Value) -> Json:
    """A msgpack value as JSON: bytes become {"base64": …}, keys become text."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): to_json(item) for key, item in value.items()}
    return value
