"""Differences planted into a step while a worker makes it; workers import this module."""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest import mock

import numpy as np

from stepfs.format.tgb import Descriptor
from stepfs_producer.commit.uploads import Ticket
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans
from stepfs_producer.run.workers import upload
from stepfs_producer.run.workers.tasks import make_step

STEP = 3


def flip_a_token(payload: bytes) -> bytes:
    return edited(payload, "input_ids", 7)


def move_a_span(payload: bytes) -> bytes:
    return edited(payload, "spans", 1)  # the start of the first one


def change_the_last_byte(payload: bytes) -> bytes:
    return payload[:-1] + b"\1"


def edited(payload: bytes, array: str, place: int) -> bytes:
    size = int.from_bytes(payload[:8], "little")
    begin = 8 + size + json.loads(payload[8 : 8 + size])[array]["data_offsets"][0]
    values = np.frombuffer(payload, "<i8", offset=begin).copy()
    values[place] += 1
    return payload[:begin] + values.tobytes()


def put_planted(
    mutant: Callable[[bytes], bytes],
    spec: PayloadSpec,
    step: StepSpans,
    to: upload.Destination,
    ticket: Ticket,
    *groups: SampleGroup,
) -> Descriptor:
    """Upload a step whose second payload differs, if it is the one; else an honest step."""
    honest = make_step

    def planted(*arguments: object) -> tuple[list[bytes], list[int]]:
        payloads, records = honest(*arguments)  # type: ignore[arg-type]
        return [payloads[0], mutant(payloads[1])], records

    with mock.patch.object(upload, "make_step", planted if ticket.seq == STEP else honest):
        return upload.put_step(spec, step, to, ticket, *groups)
