"""Every token once: the tokens of records, put together again from the spans of payloads, as whoever trains on them could."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stepfs.format.ids import SliceIndex
from stepfs.format.tgb import Descriptor
from stepfs.payload import PAIR, Buffer, read_spans
from stepfs.store.api import Store

Address = tuple[str, int, int]  # source, number of the file in its listing, offset or row
Records = dict[tuple[int, Address], list["Piece"]]  # by epoch and address


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one record in one micro-batch."""

    epoch: int
    address: Address
    first: int  # of them, counted in the record
    ids: list[int]
    micro: int = 0
    side: int = 0  # of a pair: 1 chosen, 2 rejected; 0 of none
    tag: str = ""


def pieces_of(ext: str, payload: Buffer) -> Iterator[Piece]:
    """In reading order."""
    spans = read_spans(ext, payload)
    for row, columns in enumerate(spans.table.tolist()):
        micro, _, _, source, epoch, file, offset, first = columns[:PAIR]
        address = (spans.sources[source], file, offset)
        tag = spans.tags[row] if spans.tags else ""
        yield Piece(epoch, address, first, spans.ids_of(row).tolist(), micro, max(columns[PAIR:], default=0), tag)


def by_record(pieces: Iterable[Piece]) -> Records:
    found: Records = defaultdict(list)
    for piece in pieces:
        found[piece.epoch, piece.address].append(piece)
    return found


def joined(pieces: Iterable[Piece]) -> list[int] | None:
    """The tokens of one record; None if one is missing or there twice. Its end may be missing."""
    ids: list[int] = []
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if piece.first != len(ids):
            return None
        ids += piece.ids
    return ids


def read_mount(mount: Path) -> tuple[int, Records]:
    """How many files of ranks there are below it, and all records in them."""
    ranks = sorted(mount.glob("step-*/rank-*"))
    return len(ranks), by_record(piece for rank in ranks for piece in pieces_of(rank.suffix, rank.read_bytes()))


async def payloads_of(store: Store, tgb: Descriptor) -> list[bytes]:
    """Of one step, by slice."""
    data = await store.get(tgb.key)
    assert data is not None, f"{tgb.key} is not there"
    refs = [tgb.slice(SliceIndex(index)) for index in range(tgb.slices)]
    return [data[ref.offset : ref.offset + ref.length] for ref in refs]
