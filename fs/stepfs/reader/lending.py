"""The slices that callers hold: copied out of the blocks, into memory that is reused once no caller sees it.

The copy is made while the next block is still being fetched. Blocks are free again at once, and any slice is one
contiguous view. Touched memory takes about 10 GB/s, fresh memory costs its page faults: hence the reuse. A quarter of
the budget is for copies; a caller that holds more gets memory of its own, uncounted. Slices below 1 MiB are `bytes`,
left to the allocator. The interpreter's reference counts tell when a view is gone, as in `data/buffers`.

Rejected: zero-copy views of pinned blocks. A view of one small slice would pin the whole GET that it came with (up to
9 MiB), a slice of several blocks is not contiguous, and a caller that collects views would take all memory from
prefetching.
"""

from __future__ import annotations

from typing import Final

import trio

from stepfs.data.buffers import MAPPED_BYTES_MIN, Buffer, Pool
from stepfs.data.slices import SliceHandle
from stepfs.format.ids import BLOCK_BYTES

LENT_SHARE: Final = 4  # one part in so many of the budget


class Lending:
    """Copies whole slices for callers."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: of memory that is kept for reuse, the part that callers hold included."""
        self._pool = Pool(bytes_max)

    async def copy_of(self, handle: SliceHandle) -> memoryview:
        """The whole slice, read-only and contiguous; it stays valid while the caller holds it.

        Raises as `SliceHandle.read` does.
        """
        if handle.length < MAPPED_BYTES_MIN:
            return memoryview(bytes(await handle.read(0, handle.length)))
        pooled = self._pool.take(handle.length)
        buffer = pooled or Buffer(handle.length, handle.length)
        view = buffer.view()
        try:
            for start in range(0, handle.length, BLOCK_BYTES):
                part = await handle.read(start, BLOCK_BYTES)
                view[start : start + len(part)] = part
                del part  # a view held meanwhile keeps memory from the block awaited
                await trio.lowlevel.checkpoint()
            return view.toreadonly()
        finally:
            if pooled is not None:
                self._pool.give(pooled)  # it lingers, counted, until no caller sees it
