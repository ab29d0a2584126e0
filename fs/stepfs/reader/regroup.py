"""Decoded files → the micro-batches of one data rank, for a mesh of any size.

A file of a plan without `output.files` holds several micro-batches, which only their decoded arrays tell. So a rank gets all
files that hold a part of its run of the step (`RankMap.units_of`), and takes that part here: views, no copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from stepfs.errors import UsageError
from stepfs.torch import holds_micro_batches, micro_batches
from stepfs.view.ranks import RankMap, nearest_divisors


def regrouped(files: Sequence[Any], ranks: RankMap, rank: int) -> list[Any]:
    """The micro-batches of a rank, from its decoded files; a file that is none of a plan counts as one.

    `UsageError` if the data ranks do not divide the micro-batches of the step.
    """
    held = [micro_batches(file) if holds_micro_batches(file) else [file] for file in files]
    each = len(held[0])
    if any(len(file) != each for file in held):
        raise UsageError(f"files of {[len(file) for file in held]} micro-batches: those of a step have equally many")
    units, data = ranks.grid.units * each, ranks.data_ranks
    if units % data:
        split = any(map(holds_micro_batches, files)) or ranks.grid.micro > 1
        whole = (
            "" if split else
            ". A file of this lake counts as one, because only .safetensors and .pt of plans are split here: produce those, or"
            " a file for each micro-batch (output.files: micro_batches)"
        )  # fmt: skip
        raise UsageError(
            f"mesh: its data dimensions have {data} ranks, which do not divide the {units} micro-batches of a step;"
            f" {nearest_divisors(units, data)} would{whole}"
        )
    begin = ranks.data_rank_of(rank) * (units // data) - ranks.units_of(rank).start * each
    return list(itertools.islice(itertools.chain(*held), begin, begin + units // data))
