"""What a planned producer keeps in its lake beside steps, as readers find it: plans, listings, positions, the samples of a slice.

The names of texts and listings are their digests. Positions are in commits, one behind the last step of each.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import trio
from crc32c import crc32c

from stepfs.errors import CorruptError, UsageError
from stepfs.format.commit import Commit
from stepfs.format.ids import SliceIndex, Version
from stepfs.format.keys import plan_key, source_listing_key
from stepfs.format.planned import Listing, from_shards, shard_count
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import SliceRef
from stepfs.lake.log.apply import read_commit
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Store

if TYPE_CHECKING:
    from stepfs.payload import Spans

READ_BYTES_MAX: Final = 64 << 20  # by one request; a longer slice is one request by itself
_GAP_BYTES_MAX: Final = 64 << 10
Placed = tuple[SliceIndex, SliceRef]


async def kept_plan(store: Store, lake_id: str, digest: str) -> str | None:
    data = await store.get(plan_key(lake_id, digest))
    return None if data is None else data.decode("utf-8", "replace")


async def kept_listing(store: Store, lake_id: str, digest: str) -> Listing | None:
    """A kept listing, without locations; None if it is not (wholly) there."""
    shards: list[bytes] = []
    while not shards or len(shards) < shard_count(shards[0]):
        shard = await store.get(source_listing_key(lake_id, digest, len(shards)))
        if shard is None:
            return None
        shards.append(shard)
    return from_shards(shards, digest)


async def commit_of(store: Store, lake_id: str, version: Version) -> Commit | None:
    """The commit of a log version; None once it was reclaimed."""
    found = await read_commit(store, lake_id, version)
    return None if found is None else found[0]


class LineageReader:
    """Slices of the steps of one lake, of forks' origins, too, and the spans in them."""

    def __init__(self, log: LogReader, origins: OriginStores) -> None:
        self.log = log
        self._origins = origins

    async def payloads(
        self, entry: StepEntry, slices: Sequence[SliceIndex]
    ) -> AsyncGenerator[tuple[SliceIndex, memoryview], None]:
        """These slices; neighbours are read by one request. `CorruptError` for other bytes than were committed."""
        store, key = await self._origins.of(entry.tgb, self.log.state), entry.tgb.key
        for group in _joined([(index, entry.tgb.slice(index)) for index in slices]):
            begin = group[0][1].offset
            data = memoryview(bytearray(max(ref.offset + ref.length for _, ref in group) - begin))
            got = await store.read_into(key, begin, data) if data else 0
            if got is None:
                raise CorruptError(f"{key} is missing; `stepfs verify` says what to do")
            for index, ref in group:
                payload = data[:got][ref.offset - begin : ref.offset - begin + ref.length]
                if len(payload) < ref.length or crc32c(payload) != ref.crc32c:
                    raise CorruptError(
                        f"{key}: slice {index} is not what was committed; `stepfs verify` says what to do"
                    )
                yield index, payload

    async def spans(
        self, entry: StepEntry, slices: Sequence[SliceIndex], take: Callable[[SliceIndex, Spans], None]
    ) -> None:
        """Call `take` with the spans of each of these slices. `UsageError` for a lake without spans."""
        async with aclosing(self.payloads(entry, slices)) as payloads:
            async for index, payload in payloads:
                take(index, await trio.to_thread.run_sync(self._parsed, entry, index, payload))

    def _parsed(self, entry: StepEntry, index: SliceIndex, payload: memoryview) -> Spans:
        from stepfs.payload import NoSpansError, UnreadablePayloadError, read_spans  # noqa: PLC0415  (numpy takes 100 ms)

        what = f"step {entry.step}, slice {index}"
        try:
            return read_spans(self.log.identity.ext, payload)
        except NoSpansError as error:
            raise UsageError(
                f"{what}: {error}; lineage is in the .safetensors, .pt and .tar files that `stepfs-produce run` makes"
            ) from error
        except UnreadablePayloadError as error:
            raise CorruptError(f"{what}: {error}; `stepfs verify --check-payload` looks at all files") from error


def _joined(placed: Sequence[Placed]) -> Iterator[list[Placed]]:
    """Neighbours in the object, until `READ_BYTES_MAX`."""
    group: list[Placed] = []
    end = 0
    for index, ref in sorted(placed, key=lambda one: (one[1].offset, one[0])):
        far = group and (
            ref.offset > end + _GAP_BYTES_MAX or ref.offset + ref.length - group[0][1].offset > READ_BYTES_MAX
        )
        if far:
            yield group
            group = []
        group.append((index, ref))
        end = ref.offset + ref.length
    if group:
        yield group
