"""Where a record is: its fragment, its block in each epoch, and the record by itself; for every format."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sourced import blocks, laid_out, source
from test_source_formats import write_gzip
from test_source_megatron import write_megatron

from stepfs.errors import RefusedError
from stepfs_producer.sources.listing import Layout, list_corpus, located_files
from stepfs_producer.sources.reading import read_record
from stepfs_producer.sources.record import SourceSpec

LINES = [f"line {number} " + "x" * (number * 37 % 90) for number in range(3000)]


class Pairs:
    """A format of one's own whose parts count as they like."""

    def parts(self, file):
        return [(2, 8), (2, 8)]

    def records(self, file, part):
        for number in range(2):
            yield 1000 * part + number, f"part {part} record {number}"


def text(path: Path) -> SourceSpec:
    (path / "a.txt").write_text("\n".join(LINES))
    (path / "b.txt").write_text("\n".join(LINES[:50]))
    return source(path / "a.txt", path / "b.txt", form="text")


def jsonl(path: Path) -> SourceSpec:
    (path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return source(path / "a.jsonl")


def files(path: Path) -> SourceSpec:
    (path / "a.txt").write_text("".join(f"{number} {'y' * 700}\n" for number in range(5000)))
    (path / "b.txt").write_text("short")
    return source(path / "a.txt", path / "b.txt", form="text", records="files")


def parquet(path: Path) -> SourceSpec:
    pq.write_table(pa.table({"text": LINES}), path / "a.parquet", row_group_size=700)
    pq.write_table(pa.table({"text": LINES[:9]}), path / "b.parquet")
    return source(path / "a.parquet", path / "b.parquet", form="parquet")


def gzipped(path: Path) -> SourceSpec:
    return source(write_gzip(path))


def megatron(path: Path) -> SourceSpec:
    documents = [[list(range(1 + number * 7 % 50))] for number in range(400)]
    return source(write_megatron(path, documents), form="megatron")


def own(path: Path) -> SourceSpec:
    (path / "a.pairs").write_text("pairs")
    return source(path / "a.pairs", form="test_source_places:Pairs")


@pytest.mark.parametrize("write", [text, jsonl, files, parquet, gzipped, megatron, own])
def test_a_record_is_found_where_the_blocks_have_it(tmp_path: Path, write) -> None:
    spec = write(tmp_path)
    layout = laid_out(spec, range_bytes_min=1 << 20)
    for block in blocks(spec, layout, epochs=2):
        chosen = sorted({0, len(block.records) // 2, len(block.records) - 1} & set(range(len(block.records))))
        for index in chosen:
            file, offset = int(block.records.files[index]), int(block.records.offsets[index])
            found = [(one, read_record(spec, layout.fragment(one), offset)) for one in layout.holding(file, offset)]
            (fragment, record), *more = [(one, each) for one, each in found if each is not None]
            assert not more
            assert record.data == block.records.part(index, index + 1).data
            assert (record.files.tolist(), record.offsets.tolist()) == ([file], [offset])
            first = layout.block_with(block.place.epoch, fragment)
            assert (first.epoch, first.fragment) == block.place[:2]
            assert first.block == 0


@pytest.mark.parametrize("write", [text, parquet, megatron, own])
def test_a_place_where_no_record_begins_has_none(tmp_path: Path, write) -> None:
    spec = write(tmp_path)
    layout = laid_out(spec)
    for offset in (3, 1 << 40) if write is text else (1 << 40,):
        assert not any(read_record(spec, layout.fragment(one), offset) for one in layout.holding(0, offset))


def test_a_held_out_record_is_a_record(tmp_path: Path) -> None:
    spec = jsonl(tmp_path)
    halved = source(tmp_path / "a.jsonl", holdout=0.5, shard=(1, 3))
    layout = laid_out(spec)
    assert read_record(halved, layout.fragment(0), 0).data == LINES[0].encode()


def test_only_the_files_that_are_asked_for_must_be_there(tmp_path: Path) -> None:
    spec = source(tmp_path / "*.txt", form="text")
    text(tmp_path)
    listing = list_corpus(spec)
    (tmp_path / "b.txt").unlink()
    found = located_files(spec, listing, [0], advice="restore it")
    assert read_record(spec, Layout(spec, found).fragment(0), 0).data == LINES[0].encode()
    with pytest.raises(RefusedError, match=r"the file 0/b.txt is gone; restore it$"):
        located_files(spec, listing, [1], advice="restore it")
