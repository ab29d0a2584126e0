"""Records as a source gives them, and the samples that a transform makes of them."""

from __future__ import annotations

import numpy as np

from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.sources.record import Kind, Records
from stepfs_producer.transforms.documents import Tokenised, TransformSpec
from stepfs_producer.transforms.records import transform


def bytes_of(data: list[bytes]) -> Ragged:
    return Ragged.of([np.frombuffer(one, np.uint8) for one in data], np.empty(0, np.uint8))


def records_of(kind: Kind, data: list[bytes], *, dropped=(), bad=None, mask: bytes | None = None) -> Records:
    count = len(data)
    return Records(
        kind, bytes_of(data), np.zeros(count, np.int64), np.arange(count, dtype=np.int64),
        np.isin(np.arange(count), list(dropped)), bad or {}, None if mask is None else np.frombuffer(mask, np.uint8),
    )  # fmt: skip


def keys_of(records: Records) -> list[bytes]:
    return [bytes([index % 256]) * 16 for index in range(len(records))]


def made(spec: TransformSpec, records: Records) -> Tokenised:
    return transform(spec, records, keys_of(records))
