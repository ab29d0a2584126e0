"""`format: text, records: files`: pieces of files are a function of the bytes around their ends, and `shard` deals records."""

from __future__ import annotations

import codecs
import gzip
from pathlib import Path

import pytest
from declared import transform_spec
from hypothesis import given
from hypothesis import strategies as st
from sourced import addresses, blocks, laid_out, source, values

from stepfs.errors import CorruptError
from stepfs_producer.run.identity import identity
from stepfs_producer.sources import formats as whole_files
from stepfs_producer.sources.record import Line

TEXT = st.lists(st.sampled_from(["a", "\n", "é", "語", "𝄞", "ab\ncd", "x" * 40]), max_size=60).map("".join)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_files, "PIECE_BYTES", 32)
    monkeypatch.setattr(whole_files, "TAIL_BYTES", 8)


def between(data: bytes, begin: int, end: int) -> list[Line]:
    return list(whole_files.pieces_between(lambda first, last: data[first:last], begin, end, len(data)))


@given(text=TEXT, ranges=st.integers(1, 100), reads=st.integers(1, 50))
def test_every_range_finds_the_pieces_that_begin_in_it(text: str, ranges: int, reads: int) -> None:
    data = text.encode()
    pieces = [piece for begin in range(0, len(data), ranges) for piece in between(data, begin, begin + ranges)]
    assert b"".join(piece.data for piece in pieces) == data
    assert pieces == between(data, 0, len(data))
    stream = [data[at : at + reads] for at in range(0, len(data), reads)]
    assert list(whole_files.split_pieces(stream)) == pieces, "of a compressed file, the same"
    place = 0
    for piece in pieces:
        assert (piece.offset, piece.length) == (place, len(piece.data))
        assert 0 < piece.length <= 32 + 8 + 8
        piece.data.decode()  # cut between characters
        place += piece.length


def test_pieces_end_at_line_ends_where_there_are_some() -> None:
    data = b"".join(b"line %d\n" % number for number in range(40))
    assert {piece.data[-1:] for piece in between(data, 0, len(data))} == {b"\n"}
    assert [len(piece.data) for piece in between(b"x" * 100, 0, 100)] == [32, 32, 36]


def test_a_file_is_a_record_and_what_is_no_text_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + b"\n one\n\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n" * 20))
    (tmp_path / "c.pyc").write_bytes(b"\0three")
    (tmp_path / "d.txt").write_bytes("vier\xff".encode("latin-1"))
    (tmp_path / "e.txt").touch()
    spec = source(tmp_path, form="text", records="files", shuffle=False)
    found = blocks(spec)
    assert b"|".join(values(found)) == b"\n one\n\n|" + b"two\n" * 8 + b"|" + b"two\n" * 8 + b"|" + b"two\n" * 4
    bad = [reason for block in found for reason in block.records.bad.values()]
    assert bad == ["a NUL byte, so it is no text", "not UTF-8 (invalid start byte at byte 4)"]
    assert addresses(found) == [(0, 0), (1, 0), (1, 32), (1, 64), (2, 0), (3, 0)]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n" * 20)[:-9])
    with pytest.raises(CorruptError, match="damaged gzip"):
        blocks(source(tmp_path, form="text", records="files", shuffle=False))


@pytest.mark.parametrize("records", ["lines", "files"])
def test_shards_are_parts_of_a_source(tmp_path: Path, records: str) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number} {line}\n" for line in range(40)))
    whole = values(blocks(source(tmp_path, form="text", records=records)))
    parts = [values(blocks(source(tmp_path, form="text", records=records, shard=(index, 3)))) for index in range(3)]
    assert all(parts)
    assert sorted(whole) == sorted(one for part in parts for one in part)
    (tmp_path / "00 before.txt").write_text("new\n")
    for index, part in enumerate(parts):
        later = source(tmp_path, form="text", records=records, shard=(index, 3))
        assert set(part) <= set(values(blocks(later))), "another file moves no record"


def test_a_shard_and_its_records_are_part_of_a_sources_identity(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    variants = [{}, {"shard": (0, 2)}, {"shard": (1, 2)}, {"records": "lines"}]
    specs = [source(tmp_path, form="text", **variant) for variant in variants]
    assert len({identity(spec, transform_spec(), "") for spec in specs}) == len(specs)
    assert all(laid_out(spec).fragments_count == 1 for spec in specs)
