"""The integers of the protocol as distinct types, and the bounds that every decoder checks."""

from typing import Final, NewType

Step = NewType("Step", int)  # position in the global order, dense from 0
Version = NewType("Version", int)  # log slot, dense from 0; -1 is "before the first commit"
Epoch = NewType("Epoch", int)  # incarnation of a producer id, from 1
SliceIndex = NewType("SliceIndex", int)  # which slice of a TGB, 0 ≤ i < slices
SliceKey = tuple[Step, SliceIndex]
SegmentIndex = NewType("SegmentIndex", int)  # steps [i * SEGMENT_STEPS, (i + 1) * SEGMENT_STEPS)

NO_VERSION: Final = Version(-1)
FIRST_VERSION: Final = Version(0)
FIRST_STEP: Final = Step(0)
FIRST_SEGMENT: Final = SegmentIndex(0)

INTEGER_MAX: Final = 2**53  # exact in every consumer of our JSON, and far above any real lake
TOTAL_MAX: Final = 2**63 - 1  # running totals: 8 EiB of payload, and as many records
RECORDS_MAX: Final = 1 << 40  # of one step
SLICES_MAX: Final = 1 << 14  # a segment of such steps is 200 MB
RANKS_MAX: Final = (1 << 20) - 1  # of a trainer: a mount has no names for more
SLICE_BYTES_MAX: Final = 1 << 40
BLOCK_BYTES: Final = 8 << 20  # unit of verification and of parallel fetch inside a large slice
POSITION_BYTES_MAX: Final = 64 << 10
NOTE_BYTES_MAX: Final = 256  # of a step: every entry of the log may have one
DESCRIPTOR_BYTES_MAX: Final = 416 << 10  # checksums of one step: SEGMENT_STEPS of them fit a snapshot
SEGMENT_STEPS: Final = 512  # steps per index segment; also the usual distance of snapshots
PRODUCERS_MAX: Final = 1 << 14  # ids that a lake may ever know: every snapshot contains them all
JSON_SCHEMA: Final = 1  # of documents for other programs (fs/JSON.md): fields are added, never changed
ID_BYTES_MAX: Final = 256  # producer and group ids, UTF-8
