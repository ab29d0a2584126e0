"""From an appended batch to a durable object: checked and frozen first, built and uploaded later.

An append returns before its bytes are sent, so they must not change under the upload: a buffer that the caller reuses
after the checksum would put a corrupt slice into the log permanently. `bytes` are used without a copy; every other
buffer is copied once, at memory speed. Rejected: a rule in the documentation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import msgpack
import trio

from stepfs.errors import CorruptError, PayloadTypeError, UsageError
from stepfs.format.codec import unpack
from stepfs.format.grid import Grid
from stepfs.format.ids import DESCRIPTOR_BYTES_MAX, POSITION_BYTES_MAX, RECORDS_MAX
from stepfs.format.keys import data_key
from stepfs.format.records import HEAD_BYTES, LakeIdentity, payload_problem
from stepfs.format.tgb import Descriptor, TgbImage, build, descriptor_bytes
from stepfs.store.api import Store
from stepfs_producer.pending import Item
from stepfs_producer.rebase import Incarnation

Payload = bytes | bytearray | memoryview  # or any other one-dimensional buffer of bytes

_BYTE_FORMATS: Final = {"B", "b", "c"}
_INLINE_BYTES_MAX: Final = 256 << 10  # checksumming this much takes less time than reaching a worker thread


def freeze(batch: Sequence[Payload], *, grid: Grid, bytes_max: int) -> tuple[bytes, ...]:
    """One batch as immutable payloads, one per slice; `UsageError` names the rule that it breaks."""
    if isinstance(batch, (bytes, bytearray, memoryview, str)) or not isinstance(batch, Sequence):
        raise UsageError(f"a batch is a sequence of {grid.slices} payloads, not a {type(batch).__name__}")
    if len(batch) != grid.slices:
        raise UsageError(f"a batch of {len(batch)} payloads for a lake of {grid}; pass one per slice")
    views = [_view(payload, number) for number, payload in enumerate(batch)]
    size = sum(view.nbytes for view in views)
    if size > bytes_max:
        raise UsageError(
            f"a batch of {size} bytes exceeds max_pending_bytes={bytes_max}; make smaller batches or raise the limit "
            "(a plan: smaller steps, or more --memory)"
        )
    checksums = descriptor_bytes([view.nbytes for view in views])
    if checksums > DESCRIPTOR_BYTES_MAX:
        raise UsageError(
            f"a batch of {size} bytes in {grid.slices} slices needs {checksums} bytes of checksums in the log, at most "
            f"{DESCRIPTOR_BYTES_MAX} fit; make smaller batches"
        )
    return tuple(
        payload if isinstance(payload, bytes) else view.tobytes() for payload, view in zip(batch, views, strict=True)
    )


def _view(payload: Payload, number: int) -> memoryview:
    try:
        view = memoryview(payload)
    except TypeError:
        view = None
    # The buffer of an array is not a file: it has no header with its shape, and readers refuse it.
    if view is None or view.ndim != 1 or view.format.lstrip("@=<>!") not in _BYTE_FORMATS:
        what = "" if view is None else f" of format {view.format!r} and {view.ndim} dimensions"
        raise PayloadTypeError(
            f"payload {number} is a {type(payload).__name__}{what}, not bytes; pass the bytes of a file, as "
            "file.getvalue() after numpy.save(file, array), or stepfs.torch.dump(obj)"
        )
    return view


def check_kind(payloads: Sequence[bytes], *, ext: str) -> None:
    """`UsageError` names the first payload that cannot be a file of `ext`."""
    for number, payload in enumerate(payloads):
        problem = payload_problem(ext, payload[:HEAD_BYTES], len(payload))
        if problem is not None:
            raise UsageError(
                f"payload {number} {problem}; append what the lake promises (it was made with --check-payload)"
            )


def check_records(records: Sequence[int] | None, *, slices: int) -> tuple[int, ...]:
    """The number of records per slice; a payload counts as one unless the caller gives a number."""
    if records is None:
        return (1,) * slices
    counts = tuple(records)
    if len(counts) != slices:
        raise UsageError(f"{len(counts)} record counts for {slices} slices; pass one per slice")
    if any(not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 2**32 for count in counts):
        raise UsageError("record counts are integers from 0 to 4294967295")
    if sum(counts) > RECORDS_MAX:
        raise UsageError(f"{sum(counts)} records in one batch; at most {RECORDS_MAX} can be counted")
    return counts


def pack_position(position: object) -> bytes:
    """A position as stored: msgpack of at most 64 KiB that reads back."""
    try:
        packed: bytes = msgpack.packb(position, use_bin_type=True)
        if len(packed) <= POSITION_BYTES_MAX:
            unpack(packed, "position")
    except (TypeError, ValueError, OverflowError, CorruptError) as error:
        raise UsageError(
            f"position does not fit msgpack ({error}); use numbers, text, bytes, lists and dicts of them"
        ) from error
    if len(packed) > POSITION_BYTES_MAX:
        raise UsageError(
            f"position takes {len(packed)} bytes as msgpack, at most {POSITION_BYTES_MAX} fit; store the rest elsewhere"
        )
    return packed


def unpack_position(packed: bytes) -> object:
    """Inverse of `pack_position`; None before the first commit."""
    return unpack(packed, "position") if packed else None


def described(image: TgbImage, key: str, seq: int) -> Descriptor:
    """A TGB that is in the store under `key`, as a commit names it."""
    return Descriptor(
        origin=0,
        key=key,
        size=image.size,
        seq=seq,
        packed_slices=image.packed_slices,
        packed_blocks=image.packed_blocks,
    )


class TgbWriter:
    """Builds and uploads TGBs of one incarnation, a bounded number at once."""

    def __init__(self, store: Store, identity: LakeIdentity, me: Incarnation, *, at_once: int) -> None:
        self._store = store
        self._identity = identity
        self._me = me
        self._limiter = trio.CapacityLimiter(at_once)

    async def write(self, item: Item, key: str) -> Descriptor:
        """Upload one TGB under a name of its own; durable on return. May be repeated with the same key."""
        async with self._limiter:
            image = await self._build(item)
            await self._store.put(key, image.parts, crc32c=image.crc32c)
        return described(image, key, item.seq)

    def new_key(self, item: Item) -> str:
        """A fresh name, random in part: a forked or rewound process never overwrites another's (hazard 8)."""
        return data_key(self._identity.lake_id, self._me.producer_id, self._me.epoch, item.seq)

    async def _build(self, item: Item) -> TgbImage:
        work = partial(
            build,
            lake_id=self._identity.lake_id,
            producer_id=self._me.producer_id,
            epoch=self._me.epoch,
            seq=item.seq,
            payloads=item.payloads,
            records=item.records,
        )
        if item.payload_bytes <= _INLINE_BYTES_MAX:
            return work()
        return await trio.to_thread.run_sync(work)
