"""Every record of a corpus is in exactly one block of an epoch, wherever fragments and newlines lie."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from sourced import addresses, blocks, laid_out, source, values

from stepfs.format.planned import CorpusFile, Listing
from stepfs_producer.sources.formats import lines_between, split_lines
from stepfs_producer.sources.listing import Layout, range_bytes
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import BlockAddress, identity_of

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
            {"seed": 1},
            {"shuffle": False},
            {"block_bytes": 1},
            {"text_field": "body"},
            {"tokens_field": "ids"},
            {"whole_records": True},
            {"holdout": Fraction(1, 1000)},
            {"version": "2"},
            {"options": {"a": "b"}},
            {"form": "text"},
        )
    ]
    assert len({str(identity_of(spec)) for spec in [base, *others]}) == 11
    assert identity_of(source("/d", profile="p", epochs=Fraction(2))) == identity_of(base)
