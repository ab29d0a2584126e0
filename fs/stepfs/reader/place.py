"""Which slice a rank, a micro-batch and a file name in Python."""

from __future__ import annotations

from stepfs.errors import NoSuchStepError, UsageError
from stepfs.format.arguments import check_integer
from stepfs.format.ids import SliceIndex
from stepfs.view.ranks import RankMap


def slice_at(ranks: RankMap, rank: int, micro: int | None, file: str) -> SliceIndex:
    """The slice of `lake[step][rank, micro, file]`; `NoSuchStepError` if there is none.

    `UsageError` without a micro-batch where the rank has several.
    """
    rank = check_integer(rank, "rank")
    if not 0 <= rank < ranks.world:
        raise NoSuchStepError(f"rank {rank}: this lake has ranks 0 to {ranks.world - 1}")
    count, files = len(ranks.units_of(rank)), ranks.grid.files
    if micro is None and count > 1:
        raise UsageError(
            f"rank {rank} reads {count} micro-batches: name one, from [{rank}, 0] to [{rank}, {count - 1}]"
        )
    micro = 0 if micro is None else check_integer(micro, "micro-batch")
    if not 0 <= micro < count:
        raise NoSuchStepError(f"micro-batch {micro}: rank {rank} has micro-batches 0 to {count - 1}")
    if file not in files:
        raise NoSuchStepError(f"file {file!r}: this lake has {', '.join(map(repr, files))}")
    return ranks.slice_of(rank, micro, files.index(file))
