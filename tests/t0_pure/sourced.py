"""Corpora in a directory, and every block of a source read in order: shared by the tests of sources."""

from __future__ import annotations

from declared import source_spec as source

from stepfs.format.planned import Listing
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import Block, Kind, SourceSpec


def laid_out(spec: SourceSpec, listing: Listing | None = None, **rule: int) -> Layout:
    return Layout(spec, listing or list_corpus(spec), **rule)


def blocks(spec: SourceSpec, layout: Layout | None = None, *, epochs: int = 1) -> list[Block]:
    """All blocks of the first epochs."""
    layout = layout or laid_out(spec)
    found = []
    place = BlockAddress(0, 0, 0)
    while place.epoch < epochs and (task := layout.task(place)) is not None:
        assert task.place == place
        found.append(read_block(spec, task))
        place = found[-1].follows
        assert len(found) < 100_000
    return found


def values(found: list[Block]) -> list[bytes]:
    """What the records hold, in block order; dropped and bad ones are left out."""
    return [
        one.records.data[index].tobytes()
        for one in found
        for index in range(len(one.records))
        if not one.records.dropped[index] and index not in one.records.bad
    ]


def addresses(found: list[Block]) -> list[tuple[int, int]]:
    """(file, offset) of every record, in block order."""
    return [
        pair for one in found for pair in zip(one.records.files.tolist(), one.records.offsets.tolist(), strict=True)
    ]


__all__ = ["Kind", "addresses", "blocks", "laid_out", "source", "values"]
