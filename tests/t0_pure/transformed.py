"""Records as a source gives them, and the samples that a transform makes of them."""

from __future__ import annotations

import numpy as np

from stepfs_producer.sources.record import Kind, Records
from stepfs_producer.transforms.documents import Tokenised, TransformSpec
from stepfs_producer.transforms.records import transform


def records_of(kind: Kind, data: list[bytes], *, dropped=(), bad=None, mask: bytes | None = None) -> Records:
    count = len(data)
    return Records(
        kind, b"".join(data), np.cumsum([len(one) for one in data], dtype=np.int64), np.zeros(count, np.int64),
        np.arange(count, dtype=np.int64), np.isin(np.arange(count), list(dropped)), bad or {}, mask,
    )  # fmt: skip


def keys_of(records: Records) -> list[bytes]:
    return [bytes([index % 256]) * 16 for index in range(len(records))]


def made(spec: TransformSpec, records: Records) -> Tokenised:
    return transform(spec, records, keys_of(records))
