"""Checks of a text producer that begins, against the commits of the lake's other text producers.

All rows of a lake have one shape, because a loader stacks them. A corpus is dealt to one number of shards, because
another number deals the same records again. Both are read off the positions of the lake's producers. What versions
before did not write is unknown, and unknown is accepted; only a corpus under default producer ids, whose names say
that they are shards, is recognised without it.

The same corpus: the file at which the other producer stands is among the inputs, and begins alike. So a corpus to
which files were added is the same, and another one that happens to use the same names is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from stepfs.errors import RefusedError, UsageError
from stepfs_producer.text.records import Place, Shard, TextSource
from stepfs_producer.text.steps import Shape, TextPosition, parse_position

_DEFAULT_ID: Final = re.compile(r"text-\d+-of-\d+")


def default_id(shard: Shard) -> str:
    """The producer id of a shard that was given none."""
    return f"text-{shard.index}-of-{shard.count}"


def refuse_other_shape(positions: Mapping[str, object], producer_id: str, shape: Shape) -> None:
    """`RefusedError` if this producer, or while its own is unknown another of the lake, made rows of another shape."""
    known = {name: position.shape for name, position in _text_positions(positions) if position.shape}
    if producer_id in known:
        known = {producer_id: known[producer_id]}
    for name, (rows, seq_len) in known.items():
        if (rows, seq_len) != (shape.rows_per_slice, shape.seq_len):
            raise RefusedError(
                f"producer {name} has put {rows} rows of {seq_len} tokens into each slice of this lake, "
                f"not {shape.rows_per_slice} of {shape.seq_len}; continue with --seq-len {seq_len} --batch-size {rows}, "
                "or produce into another lake"
            )


def refuse_resharding(positions: Mapping[str, object], producer_id: str, source: TextSource) -> None:
    """`RefusedError` if this producer would begin a corpus that the lake holds in another number of shards."""
    shard = source.shard
    if positions.get(producer_id) is not None:
        return
    for name, position in _text_positions(positions):
        if position.shard.count == shard.count or position.cursor is None:
            continue
        dealt = position.shape is not None or bool(
            _DEFAULT_ID.fullmatch(name) and _DEFAULT_ID.fullmatch(producer_id)
        )
        if dealt and _may_hold(source, position.cursor.place, position.head):
            old = position.shard
            raise RefusedError(
                f"producer {name} has produced shard {old.index}/{old.count} of this corpus, not {shard.index}/{shard.count}: "
                f"that would commit the same records again; continue with --shard {old.index}/{old.count} and the "
                "other shards of it, or produce into another lake"
            )


def _may_hold(source: TextSource, place: Place, head: str) -> bool:
    """Whether the file at `place` may be the source's file of that name, as far as known."""
    return source.holds(place.name) and (not head or source.head(place) == head)


def _text_positions(positions: Mapping[str, object]) -> Iterator[tuple[str, TextPosition]]:
    """The text positions that this version can read, by producer id."""
    for name, value in sorted(positions.items()):
        if isinstance(value, Mapping) and value.get("pipeline") == "text":
            try:
                yield name, parse_position(value)
            except (KeyError, TypeError, ValueError, UsageError):
                continue
