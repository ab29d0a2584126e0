"""The integers of the protocol as distinct types, and the bounds every decoder checks them against."""

from __future__ import annotations

from typing import Final, NewType

Step = NewType("Step", int)  # position in the global order, dense from 0
Version = NewType("Version", int)  # log slot, dense from 0; -1 is "before the first commit"
Epoch = NewType("Epoch", int)  # incarnation of a producer id, from 1
SliceIndex = NewType("SliceIndex", int)  # which slice of a TGB, 0 ≤ i < slices
SegmentIndex = NewType("SegmentIndex", int)  # steps [i * SEGMENT_STEPS, (i + 1) * SEGMENT_STEPS)

NO_VERSION: Final = Version(-1)

INTEGER_MAX: Final = 2**53  # exact in every consumer of our JSON, and far above any real lake
SLICES_MAX: Final = (1 << 20) - 1  # index + 1 has 20 bits in an inode number (view/inodes.py)
SLICE_BYTES_MAX: Final = 1 << 40
BLOCK_BYTES: Final = 8 << 20  # unit of verification and of parallel fetch inside a large slice
POSITION_BYTES_MAX: Final = 64 << 10
SEGMENT_STEPS: Final = 512  # steps per index segment; also how far apart snapshots usually are
ID_BYTES_MAX: Final = 256  # producer and group ids, UTF-8
