"""Positions of a lake's text producers: what one that begins may do beside them, and what they remember of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepfs.errors import RefusedError
from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.beginning import refuse_other_shape, refuse_resharding
from stepfs_producer.text.finished import FILES_MAX, FinishedFiles
from stepfs_producer.text.pack import Cursor
from stepfs_producer.text.records import Place, Shard, TextSource
from stepfs_producer.text.steps import Shape, TextPosition, read_position, text_steps
from stepfs_producer.transforms.tokenize import ByteTokenizer

SHAPE = Shape(1, 2, 16, ".bin")


ALL = Shard()


def position(shard: Shard = ALL, **changes: object) -> dict[str, object]:
    at = Cursor(Place("a.txt", 0, 0), 1)
    return TextPosition(shard, "bytes", at, shape=(2, 16)).value() | changes


FOREIGN = {"other": 7, "images": {"pipeline": "images"}, "broken": {"pipeline": "text", "at": None}}


def test_only_a_known_shape_counts_and_the_own_one_first() -> None:
    older = position()
    del older["shape"]
    refuse_other_shape({**FOREIGN, "a": older, "b": position()}, "c", SHAPE)
    with pytest.raises(RefusedError, match="producer b has put 2 rows of 32"):
        refuse_other_shape({"a": older, "b": position(shape=[2, 32])}, "c", SHAPE)
    with pytest.raises(
        RefusedError, match="producer b has put 2 rows of 32"
    ):  # an older position tells nothing
        refuse_other_shape({"a": older, "b": position(shape=[2, 32])}, "a", SHAPE)
    mixed = {"a": position(), "b": position(shape=[2, 32])}  # in a lake that older versions wrote to
    refuse_other_shape(mixed, "a", SHAPE)


def test_a_corpus_is_recognised_by_the_file_where_the_other_producer_stands(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    (tmp_path / "b.txt").write_bytes(b"0123456789")
    source = TextSource(list_sources([tmp_path]), shard=Shard(0, 2))

    def begin(other: dict[str, object], producer_id: str = "new") -> None:
        refuse_resharding({**FOREIGN, "old": other}, producer_id, source)

    head = source.head(Place("b.txt", 5, 0))
    for same in ({}, {"at": ["b.txt", 5, 0, 0], "head": head}, {"at": ["b.txt", 5, 0, 0], "head": ""}):
        with pytest.raises(RefusedError, match="old has produced shard 0/1 of this corpus, not 0/2"):
            begin(position(**same))
        begin(position(**same), "old")  # it continues
    begin(position(Shard(1, 2)))
    begin(position(at=["c.txt", 5, 0, 0]))
    begin(position(at=["b.txt", 4, 0, 0], head=head))
    older = position()
    del older["shape"]
    begin(older)
    refuse_resharding({"text-0-of-1": older}, "mine", source)
    with pytest.raises(RefusedError, match="text-0-of-1"):
        refuse_resharding({"text-0-of-1": older}, "text-0-of-2", source)


def test_what_is_remembered_of_files_is_bounded_and_the_newest(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 10):
        (tmp_path / f"{number:04d}").write_bytes(b"x" * number)
    files = list_sources([tmp_path])
    finished = FinishedFiles()
    for number, file in enumerate(files):
        finished.add(file.name, number)
    assert len(finished.packed()) == 12 * FILES_MAX
    assert FinishedFiles(finished.packed()).packed() == finished.packed()
    assert finished.grown(files) == []
    for file in files:
        with Path(file.path).open("ab") as stream:
            stream.write(b"y")
    Path(files[40].path).unlink()
    Path(files[41].path).write_bytes(b"")
    assert FinishedFiles(finished.packed()).grown(files) == [f.name for f in (*files[10:40], *files[42:])]


@pytest.mark.parametrize("packed", [b"", b"short", bytes(13)])
def test_a_damaged_memory_of_files_stops_nobody(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert FinishedFiles(packed).grown(list_sources([tmp_path])) == []


@pytest.mark.parametrize("count", [1, 2])
def test_growth_where_a_producer_stands_is_named_where_it_may_be_nobodys(tmp_path: Path, count: int) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 20)
    shards = [Shard(index, count) for index in range(count)]
    sources = {shard: TextSource(list_sources([tmp_path]), shard=shard) for shard in shards}
    ends = {
        shard: step.position
        for shard, source in sources.items()
        for step in text_steps(source, ByteTokenizer(), SHAPE, TextPosition(shard, "bytes"))
    }
    [(shard, end)] = ends.items()  # one shard holds the only record
    with (tmp_path / "a.txt").open("ab") as stream:
        stream.write(b"more")
    again = read_position(end.value(), shard=shard, tokenizer="bytes")
    assert again.cursor is not None
    grown = sources[shard].grown(FinishedFiles(again.finished), again.cursor.place)
    assert grown == ([] if count == 1 else ["a.txt"])


def test_a_position_of_an_older_version_reads_and_one_of_today_says_its_shape(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"text " * 20)
    source = TextSource(list_sources([tmp_path]))
    older = position()
    del older["shape"]
    start = read_position(older, shard=Shard(), tokenizer="bytes")
    assert start.value() == older
    *_, last = text_steps(source, ByteTokenizer(), SHAPE, start)
    assert last.position.value()["shape"] == [2, 16]
    assert isinstance(last.position.value()["finished"], bytes)
