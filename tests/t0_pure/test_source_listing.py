"""The files of a source: how they are listed, cut into blocks, and named."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from declared import changed, transform_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from sourced import addresses, blocks, laid_out, source, values
from written import write_gzip, write_megatron

from stepfs.errors import AbsentError, CorruptError, RefusedError, StepfsError, UsageError
from stepfs.format.keys import plan_key, source_listing_key
from stepfs.format.planned import CorpusFile, Listing, from_shards, shard_count
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.sources import Shuffle
from stepfs_producer.plan.values import Shard
from stepfs_producer.run.identity import identity
from stepfs_producer.sources import files as opened
from stepfs_producer.sources.find import _matches
from stepfs_producer.sources.formats import lines_between, split_lines
from stepfs_producer.sources.listing import Layout, accepted, list_corpus, located, located_files, range_bytes
from stepfs_producer.sources.reading import read_block, read_record
from stepfs_producer.sources.record import SourceSpec

LINE = b'{"text": "x"}\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in (
        "web/b.jsonl",
        "web/a/deep.ndjson",
        "web/.hidden/no.jsonl",
        "web/README.md",
        "more/[1].jsonl",
        "more/2.jsonl",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(LINE)
    return tmp_path


def names(*entries: Path | str, form: str = "jsonl") -> list[str]:
    return [file.name for file in list_corpus(source(*entries, form=form)).files]


def test_names_are_those_below_each_entry_sorted_as_utf8(root) -> None:
    assert names(f"{root}/web/") == ["0/a/deep.ndjson", "0/b.jsonl"]
    assert names(root / "more", root / "web") == ["0/2.jsonl", "0/[1].jsonl", "1/a/deep.ndjson", "1/b.jsonl"]
    assert names(f"{root}/web/**/*.*json*") == ["0/a/deep.ndjson", "0/b.jsonl"]
    assert names(f"{root}/*/*.jsonl") == ["0/more/2.jsonl", "0/more/[1].jsonl", "0/web/b.jsonl"]
    assert names(f"file://{root}/web/README.md") == ["0/README.md"]
    assert names(root / "more/[1].jsonl") == ["0/[1].jsonl"]  # a file of that name is no glob
    assert names(root / "more/2.jsonl", root / "more") == ["0/2.jsonl", "1/[1].jsonl"]
    (root / "web/ü.jsonl").write_bytes(LINE)
    (root / "web/z.jsonl").write_bytes(LINE)
    assert names(root / "web") == ["0/a/deep.ndjson", "0/b.jsonl", "0/z.jsonl", "0/ü.jsonl"]


def test_a_corpus_that_moved_is_the_same(root, tmp_path) -> None:
    before = list_corpus(source(root / "web"))
    os.rename(root / "web", root / "moved")
    after = list_corpus(source(root / "moved"))
    assert after.digest == before.digest
    assert len(before.digest) == 32
    assert located(before, after, "code").files == after.files


def test_an_entry_put_in_front_or_left_out_leaves_the_files_of_the_others(tmp_path) -> None:
    for entry in "zabc":
        (tmp_path / entry).mkdir()
        (tmp_path / entry / "part-0.jsonl").write_bytes(LINE + entry.encode() * 9 + b"\n")
    before = list_corpus(source(*(tmp_path / entry for entry in "abc")))
    more = source(*(tmp_path / entry for entry in "zabc"))
    assert [file.location for file in located(before, list_corpus(more), "web").files] == [
        file.location for file in before.files
    ]
    assert located_files(more, before, [1], advice="").files[1].location == before.files[1].location
    fewer = list_corpus(source(tmp_path / "a", tmp_path / "c"))
    with pytest.raises(RefusedError, match=r"the file 1/part-0\.jsonl is gone"):
        located(before, fewer, "web")
    listing, lines = accepted(before, fewer)
    assert [file.location for file in listing.files if file.size] == [file.location for file in fewer.files]
    assert lines == ["1/part-0.jsonl is gone: it gives nothing from here on"]


@pytest.mark.parametrize(
    ("entry", "kind", "said"),
    [
        ("absent", AbsentError, "no such file or directory; name files that exist"),
        ("*.nothing", AbsentError, "no files; name files, a directory of them, or a glob that matches"),
        ("empty", AbsentError, "no files that end in .jsonl, .jsonl.gz"),
        ("nought", AbsentError, "source code: all its files are empty; name files with records"),
        ("/dev/null", UsageError, "neither a file nor a directory"),
        ("file:web", UsageError, "no such file"),
        ("s3://", UsageError, "names no bucket; write s3://bucket/prefix/"),
        ("s3://key:secret@host/x", UsageError, "credentials do not belong into a URL"),
    ],
)
def test_an_entry_that_stands_for_nothing_is_refused(root, entry, kind, said) -> None:
    (root / "empty").mkdir()
    (root / "nought").mkdir()
    (root / "nought/a.jsonl").touch()
    kind = AbsentError if entry == "file:web" else kind
    entry = entry if "://" in entry else os.path.join(root, entry)
    with pytest.raises(kind) as caught:
        list_corpus(source(entry))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_listing_is_stored_in_shards_and_read_back(root, monkeypatch) -> None:
    monkeypatch.setattr("stepfs.format.planned.SHARD_FILES_MAX", 2)
    listing = list_corpus(source(root / "more", root / "web", root / "web/README.md"))
    shards = listing.to_shards()
    assert len(shards) == shard_count(shards[0]) == 3
    stored = from_shards(shards, listing.digest)
    assert stored.digest == listing.digest
    assert located(stored, listing, "code") == listing
    with pytest.raises(CorruptError, match="has other bytes"):
        from_shards(shards[:2], listing.digest)
    with pytest.raises(CorruptError, match="malformed"):
        from_shards([b"\xc1"], listing.digest)
    assert source_listing_key("f" * 32, listing.digest, 2).startswith(f"{'f' * 32}/sources/{listing.digest}/0000")
    assert plan_key("f" * 32, listing.digest) == f"{'f' * 32}/plans/{listing.digest}"


def shorten(path: Path) -> None:
    os.truncate(path, 5)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(LINE)


def begin_otherwise(path: Path) -> None:
    path.write_bytes(LINE.replace(b"x", b"y"))


CHANGES: dict[Callable[[Path], None], str] = {
    os.unlink: "is gone",
    shorten: "is shorter than",
    lengthen: "is longer than",
    begin_otherwise: "begins otherwise than",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_between_two_starts_is_refused_by_name(root, change) -> None:
    spec = source(root / "web")
    before = from_shards(list_corpus(spec).to_shards(), list_corpus(spec).digest)
    (root / "web/new.jsonl").write_bytes(LINE)
    assert len(located(before, list_corpus(spec), "code").files) == 2  # a new file is none of this epoch's
    change(root / "web/b.jsonl")
    with pytest.raises(RefusedError, match=rf"b\.jsonl {CHANGES[change]}.*restore it, or .* --accept-changes"):
        located(before, list_corpus(spec), "code")


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_since_it_was_listed_is_refused_by_name(root, change) -> None:
    spec = source(root / "web")
    layout = laid_out(spec)
    change(root / "web/b.jsonl")
    opened._checked.clear()
    with pytest.raises(RefusedError, match=rf"b\.jsonl {CHANGES[change]}.*restore it, or .* --accept-changes"):
        blocks(spec, layout)


def trusting_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: a file of the same name is the same file."""
    monkeypatch.setattr(opened._Local, "_change", lambda self, status, head: "")


def trusting_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: a file of the same name and size is the same file."""
    honest = opened._Local._change
    monkeypatch.setattr(opened._Local, "_change", lambda self, status, head: honest(self, status, ""))


def skipping_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: what cannot be read is taken for the end of the file."""
    honest = opened._Local.read

    def read(self, begin, end):
        try:
            return honest(self, begin, end)
        except OSError:
            return b""

    monkeypatch.setattr(opened._Local, "read", read)


def complaints(spec: SourceSpec, listing: Listing, path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is wrong with a reader: files that change and a disk that fails for a while must not show in records."""
    layout, found = laid_out(spec, listing), set()
    expected = values(blocks(spec, layout))
    honest, failures = os.pread, [OSError(errno.EIO, "Input/output error")]

    def failing(*arguments):
        if failures:
            raise failures.pop()
        return honest(*arguments)

    monkeypatch.setattr(os, "pread", failing)
    try:
        if values(blocks(spec, layout)) != expected:
            found.add("a transient error changed the records")
    except OSError as error:
        if error.filename != str(path):
            found.add("an error does not name its file")
    monkeypatch.setattr(os, "pread", honest)
    assert values(blocks(spec, layout)) == expected
    opened._checked.clear()
    begin_otherwise(path)
    try:
        blocks(spec, layout)
        found.add("a changed file was read")
    except StepfsError:
        pass
    return found


MUTANTS = {
    trusting_names: {"a changed file was read"},
    trusting_sizes: {"a changed file was read"},
    skipping_errors: {"a transient error changed the records"},
    None: set(),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught_and_the_reader_is_not(tmp_path, mutant, monkeypatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE)
    spec = source(tmp_path)
    listing = list_corpus(spec)
    if mutant is not None:
        mutant(monkeypatch)
    assert complaints(spec, listing, path, monkeypatch) == MUTANTS[mutant]


@pytest.mark.parametrize(
    ("key", "pattern", "matches"), [
        ("a/b.parquet", "a/*.parquet", True), ("a/x/b.parquet", "a/*.parquet", False),
        ("a/x/b.parquet", "**/*.parquet", True), ("b.parquet", "**/*.parquet", True), ("a/b/c", "a/**", True),
        ("a", "a/**", False), (".a/b", "**", False), (".a", "*", False), (".a", ".*", True),
        ("a1", "a[0-9]", True),
    ],
)  # fmt: skip
def test_globs_of_objects_match_as_those_of_files(key, pattern, matches) -> None:
    assert _matches(key.split("/"), pattern.split("/")) is matches


LINES = st.lists(
    st.sampled_from(["", " \t", "a", "grüße", "日本語" * 7, "x" * 90, "\r", '{"text": "y"}', "\u2028z"]), max_size=30
)


@settings(deadline=None)
@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(1, 70), st.integers(1, 40), st.booleans())
def test_every_line_begins_in_exactly_one_range(lines_, end, final, size, piece, bom) -> None:
    text = end.join(lines_) + (end if final else "")
    data = (b"\xef\xbb\xbf" if bom else b"") + text.encode()
    expected = [line.removesuffix(b"\r") for line in text.encode().split(b"\n") if line.strip()]
    found = [
        line
        for begin in range(0, len(data), size)
        for line in lines_between(lambda b, e: data[b:e], begin, min(begin + size, len(data)), len(data))
    ]
    assert [line.data for line in found] == expected
    pieces = [data[first : first + piece] for first in range(0, len(data), piece)]
    assert list(split_lines(pieces, 0)) == found
    for line in found:
        kept = data[line.offset : line.offset + line.length]
        assert kept.removeprefix(b"\xef\xbb\xbf" if not line.offset else b"").removesuffix(b"\r") == line.data


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.text("ab日\n", max_size=30), max_size=20), min_size=1, max_size=4),
    st.integers(1, 400),
    st.sampled_from([16, 64, 256]),
    st.booleans(),
)
def test_every_record_is_in_exactly_one_block_of_each_epoch(tmp_path_factory, files, block, least, shuffle):
    root = tmp_path_factory.mktemp("corpus")
    texts = [text for file in files for text in file]
    if not texts:
        return
    for number, file in enumerate(files):
        (root / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in file))
    spec = source(root, block_bytes=block, shuffle=shuffle, epochs=Fraction(2))
    layout = laid_out(spec, range_bytes_min=least)
    for epoch in range(2):
        found = [one for one in blocks(spec, layout, epochs=2) if one.place.epoch == epoch]
        assert sorted(values(found)) == sorted(text.encode() for text in texts)
        assert len(set(addresses(found))) == len(texts)
        assert [one.ended for one in found] == [False] * (len(found) - 1) + [epoch == 1]
    if not shuffle:
        assert values(blocks(spec, layout)) == [text.encode() for text in texts]
    assert layout.task(BlockAddress(2, 0, 0)) is None


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_blocks_checksum_follows_the_file_and_no_policy(tmp_path, form) -> None:
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps({"text": "x" * number}) + "\n" for number in range(99)))
    else:
        pq.write_table(pa.table({"text": ["x" * number for number in range(99)]}), path)
    spec = source(path, form=form)

    def checksums(**policy: object) -> list[int]:
        return [one.crc32c for one in blocks(changed(spec, **policy), epochs=2)]

    usual = checksums()
    assert len(usual) == 2
    for policy in (
        {"epochs": Fraction(3, 2)},
        {"skip_damaged": True},
        {"shard": Shard(1, 2), "holdout": Fraction(1, 2)},
    ):
        assert checksums(**policy) == usual
    if form == "jsonl":
        path.write_bytes(path.read_bytes().replace(b"xx", b"xy", 1))
        assert not set(checksums()) & set(usual)


def listing(*sizes: int) -> Listing:
    return Listing(tuple(CorpusFile(f"0/{n}.jsonl", size, "", "", (), f"/c/{n}.jsonl") for n, size in enumerate(sizes)))


def test_ranges_are_the_least_power_of_two_that_gives_few_enough_fragments() -> None:
    mib = 1 << 20
    assert range_bytes(np.array([1, 5 * mib])) == mib
    assert range_bytes(np.array([mib << 20])) == mib
    assert range_bytes(np.array([(mib << 20) + 1])) == 2 * mib
    assert range_bytes(np.array([mib << 20]), others=1) == 2 * mib
    assert range_bytes(np.array([10, 10, 10]), least=1, most=2) == 16  # a fragment per file is the least


BLOCKS = [  # place, fragments (file, MiB where it begins), key, the place behind it
    ((0, 0, 0), [(1, 0), (1, 4), (1, 5), (2, 1)], "07d27dcd0e53c569fe36e1199268fb49", (0, 4, 0)),
    ((0, 4, 0), [(1, 1), (1, 3), (2, 0)], "55bc086d75d010d355a6f6e6da090076", (0, 7, 0)),
    ((0, 7, 0), [(0, 1), (0, 0), (1, 2)], "a07463ac4acfdc34d150e3d76073d6d5", (0, 10, 0)),
    ((0, 10, 0), [(0, 2)], "fa18b38260b526e196f65224928d70ff", (1, 0, 0)),
    ((1, 0, 0), [(1, 1), (0, 0), (1, 3)], "4110d69500fd58fa3309563c744e7676", (1, 3, 0)),
    ((1, 3, 0), [(2, 0), (2, 1), (1, 5), (1, 4)], "5c7b6d369b44a080db6c22e6469f1c0b", (1, 7, 0)),
    ((1, 7, 0), [(0, 2), (1, 0), (0, 1)], "93292cec80a847684d2c17f4eb5c3bfe", (1, 10, 0)),
    ((1, 10, 0), [(1, 2)], "d43a5aa1ab1d920bc91d21a813fb6817", (2, 0, 0)),
]


def test_blocks_are_those_of_the_table() -> None:
    mib = 1 << 20
    layout = Layout(source("/c", name="code", block_bytes=3 * mib), listing(3 * mib, 5 * mib + 1, 2 * mib))
    assert (layout.fragments_count, layout.total_bytes) == (11, 10 * mib + 1)
    assert layout.largest_block_bytes == 4 * mib - 1
    place, found = BlockAddress(0, 0, 0), []
    while place.epoch < 2:
        task = layout.task(place)
        assert task is not None
        assert pickle.loads(pickle.dumps(task)) == task
        assert layout.task(place) == task
        parts = [(one.file, one.begin // mib) for one in task.fragments]
        found.append((tuple(place), parts, task.key.hex(), tuple(task.next_fragment)))
        place = task.next_fragment
    assert found == BLOCKS
    assert layout.fragment(8).end - layout.fragment(8).begin == 1


RECORDS = [
    ((0, 0, 0), "1.0 0.5 0.4 1.1"),
    ((0, 2, 0), "0.3 1.5 0.2 1.4"),
    ((0, 4, 0), "1.2 0.1 0.0 1.3"),
]  # ranges of 32 bytes, blocks of 40
CUT = [
    ((0, 0, 0), "1.1 1.0"),
    ((0, 0, 1), "1.3 1.2"),
    ((0, 1, 0), "1.5 1.4"),
    ((0, 2, 0), "0.4 0.5"),
    ((0, 3, 0), "0.1 0.0"),
    ((0, 3, 1), "0.3 0.2"),
]  # ranges of 64 bytes, blocks of 30


def corpus(root: Path, files: int = 2, records: int = 6) -> Path:
    for number in range(files):
        text = "".join(json.dumps({"text": f"{number}.{record}"}) + "\n" for record in range(records))
        (root / f"{number}.jsonl").write_text(text)
    return root


def test_records_are_in_the_order_of_the_table(tmp_path) -> None:
    spec = source(corpus(tmp_path), block_bytes=40, seed=8)
    found = blocks(spec, laid_out(spec, range_bytes_min=32), epochs=1)
    assert [(tuple(one.place), b" ".join(values([one])).decode()) for one in found] == RECORDS
    cut = source(tmp_path, block_bytes=30, seed=8)
    found = blocks(cut, laid_out(cut, range_bytes_min=64), epochs=1)
    assert [(tuple(one.place), b" ".join(values([one])).decode()) for one in found] == CUT


def test_a_block_that_is_read_again_or_out_of_turn_is_the_same(tmp_path) -> None:
    spec = source(corpus(tmp_path, 1, 40), block_bytes=30)
    layout = laid_out(spec)
    found = blocks(spec, layout)
    assert len(found) > 10
    for one in (found[7], found[3], found[9], found[3], found[0]):
        task = layout.task(one.place)
        assert task is not None
        again = read_block(spec, task)
        assert (values([again]), again.follows) == (values([one]), one.follows)


def test_without_shuffle_all_is_as_stored(tmp_path) -> None:
    spec = source(corpus(tmp_path), shuffle=False)
    assert values(blocks(spec)) == [f"{number}.{record}".encode() for number in range(2) for record in range(6)]


def test_a_fractional_last_epoch_keeps_some_records_and_every_place(tmp_path) -> None:
    spec = source(corpus(tmp_path, 3, 200), epochs=Fraction(5, 2))
    found = blocks(spec, epochs=4)
    assert {one.place.epoch for one in found} == {0, 1, 2}
    counts = [sum(len(one.records) for one in found if one.place.epoch == epoch) for epoch in range(3)]
    assert counts == [600] * 3
    kept = [values([one for one in found if one.place.epoch == epoch]) for epoch in range(3)]
    assert [len(one) for one in kept[:2]] == [600, 600]
    assert 240 < len(kept[2]) < 360
    assert set(kept[2]) < set(kept[0])
    assert found[-1].ended


def test_a_duplicate_is_on_the_same_side_of_the_holdout_in_every_epoch(tmp_path) -> None:
    corpus(tmp_path, 1, 400)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "0.jsonl").read_bytes())
    sides = [
        sorted(values(blocks(source(tmp_path, holdout=Fraction(1, 4), held_out=held), epochs=2)))
        for held in (False, True)
    ]
    assert not set(sides[0]) & set(sides[1])
    assert len(sides[0]) + len(sides[1]) == 1600
    assert all(len(side) == 4 * len(set(side)) for side in sides)
    assert 60 < len(set(sides[1])) < 140


def test_what_decides_the_bytes_is_named_by_the_identity() -> None:
    base = source("/c")
    others = [
        source("/c", **change)
        for change in (
            {"seed": 1}, {"shuffle": False}, {"text_field": "body"}, {"tokens_field": "ids"},
            {"whole_records": True}, {"holdout": Fraction(1, 1000)}, {"version": "2"},
            {"form": "m:C"}, {"form": "m:C", "options": {"a": "b"}}, {"form": "text"},
        )
    ]  # fmt: skip
    others.append(replace(base, source=base.source.changed(shuffle=Shuffle(block="1M"))))
    assert len({identity(spec, transform_spec(), "") for spec in [base, *others]}) == 12
    alike = source("/d", profile="p", epochs=Fraction(2))
    assert identity(alike, transform_spec(), "") == identity(base, transform_spec(), "")


SAID = [f"line {number} " + "x" * (number * 37 % 90) for number in range(3000)]


class Pairs:
    """A format of one's own whose parts count as they like."""

    def parts(self, file):
        return [(2, 8), (2, 8)]

    def records(self, file, part):
        for number in range(2):
            yield 1000 * part + number, f"part {part} record {number}"


def text(path: Path) -> SourceSpec:
    (path / "a.txt").write_text("\n".join(SAID))
    (path / "b.txt").write_text("\n".join(SAID[:50]))
    return source(path / "a.txt", path / "b.txt", form="text", records="lines")


def jsonl(path: Path) -> SourceSpec:
    (path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in SAID))
    return source(path / "a.jsonl")


def files(path: Path) -> SourceSpec:
    (path / "a.txt").write_text("".join(f"{number} {'y' * 700}\n" for number in range(5000)))
    (path / "b.txt").write_text("short")
    return source(path / "a.txt", path / "b.txt", form="text", records="files")


def parquet(path: Path) -> SourceSpec:
    pq.write_table(pa.table({"text": SAID}), path / "a.parquet", row_group_size=700)
    pq.write_table(pa.table({"text": SAID[:9]}), path / "b.parquet")
    return source(path / "a.parquet", path / "b.parquet", form="parquet")


def gzipped(path: Path) -> SourceSpec:
    return source(write_gzip(path))


def megatron(path: Path) -> SourceSpec:
    documents = [[list(range(1 + number * 7 % 50))] for number in range(400)]
    return source(write_megatron(path, documents), form="megatron")


def own(path: Path) -> SourceSpec:
    (path / "a.pairs").write_text("pairs")
    return source(path / "a.pairs", form="test_source_listing:Pairs")


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
            assert record.data[0].tolist() == block.records.data[index].tolist()
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
    assert read_record(halved, layout.fragment(0), 0).data[0].tobytes() == SAID[0].encode()


def test_only_the_files_that_are_asked_for_must_be_there(tmp_path: Path) -> None:
    spec = source(tmp_path / "*.txt", form="text", records="lines")
    text(tmp_path)
    listing = list_corpus(spec)
    (tmp_path / "b.txt").unlink()
    found = located_files(spec, listing, [0], advice="restore it")
    assert read_record(spec, Layout(spec, found).fragment(0), 0).data[0].tobytes() == SAID[0].encode()
    with pytest.raises(RefusedError, match=r"the file 0/b.txt is gone; restore it$"):
        located_files(spec, listing, [1], advice="restore it")
