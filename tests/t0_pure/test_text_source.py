"""Records of a corpus: every byte once, from any place on, in shards that partition."""

import gzip
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.records import Place, Record, Shard, TextSource

TEXT = b"no NUL, or it would pass for binary: "
contents = st.builds(
    lambda lines: TEXT + b"".join(lines),
    st.lists(
        st.sampled_from([b"\n", b"short\n", b"x" * 40, "naïve 日本\n".encode(), b"\xff\xfe\n"]), max_size=40
    ),
)
corpora = st.dictionaries(
    st.sampled_from(["a.txt", "a/b.py", "b.txt.gz", "c", "d/e/f.md"]), contents, min_size=1
)


@contextmanager
def directory(files: Mapping[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for relative, data in files.items():
            path = root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(data) if relative.endswith(".gz") else data)
        yield root


def documents(records: list[Record]) -> dict[str, bytes]:
    """Document → its bytes; fails on a hole or an overlap."""
    found: dict[str, bytearray] = {}
    for record in records:
        held = found.setdefault(record.document, bytearray())
        assert record.start == len(held)
        held += record.data
    return {name: bytes(data) for name, data in found.items()}


@given(corpora, st.integers(2, 64))
def test_every_byte_of_every_file_is_in_one_record(files: dict[str, bytes], record_bytes: int) -> None:
    with directory(files) as root:
        records = list(TextSource(list_sources([root]), record_bytes=record_bytes).records())
    assert documents(records) == files
    assert [record.here.name for record in records] == sorted(record.here.name for record in records)
    assert all(0 < len(record.data) <= record_bytes for record in records)


@given(corpora, st.integers(2, 64), st.integers(1, 5), st.data())
@settings(max_examples=50)
def test_any_place_continues_the_same_stream_and_shards_partition(
    files: dict[str, bytes], record_bytes: int, shards: int, data: st.DataObject
) -> None:
    with directory(files) as root:
        sources = list_sources([root])
        whole = list(TextSource(sources, record_bytes=record_bytes).records())
        parts = [
            TextSource(sources, shard=Shard(i, shards), record_bytes=record_bytes) for i in range(shards)
        ]
        streams = [list(part.records()) for part in parts]
        assert sorted((r for stream in streams for r in stream), key=whole.index) == whole
        assert sum(map(len, streams)) == len(whole)
        mine = data.draw(st.sampled_from([(p, s) for p, s in zip(parts, streams, strict=True) if s]))
        at = data.draw(st.integers(0, len(mine[1]) - 1))
        assert list(mine[0].records(mine[1][at].here)) == mine[1][at:]
        assert list(mine[0].records(mine[1][at].after)) == mine[1][at + 1 :]


def test_a_large_file_is_cut_after_lines_and_between_characters(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"0123456\n" * 10)
    (tmp_path / "wide").write_text("日" * 10)
    records = list(TextSource(list_sources([tmp_path]), record_bytes=20).records())
    assert {r.data for r in records if r.document == "lines"} == {b"0123456\n" * 2}
    assert "".join(r.data.decode() for r in records if r.document == "wide") == "日" * 10


def test_shards_of_one_large_file_all_get_a_fair_part(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_bytes(b"a line of text\n" * 20_000)
    sizes = [
        sum(
            len(r.data)
            for r in TextSource(list_sources([tmp_path]), shard=Shard(i, 4), record_bytes=1000).records()
        )
        for i in range(4)
    ]
    assert min(sizes) > 0.7 * max(sizes)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".ndjson"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    texts = ["one", "", "zwei\n\u0000", "три", "\ud800 lone"]
    lines = "".join(
        json.dumps({"id": n, "body": text}) + "\n" * (1 + (n == 1)) for n, text in enumerate(texts)
    )
    path = tmp_path / f"c{suffix}"
    path.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    source = TextSource(list_sources([path]), text_field="body")
    records = list(source.records())
    assert [r.data.decode("utf-8", "surrogatepass") for r in records] == texts
    assert [r.document for r in records] == [f"c{suffix}:{n}" for n in (1, 2, 4, 5, 6)]
    assert list(source.records(records[2].after)) == records[3:]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{not json\n", "c.jsonl:2: not JSON"),
        (b'{"text": 3}\n', "no text in the field 'text'"),
        (b"[1]\n", "c.jsonl:2"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "fine"}\n' + line)
    with pytest.raises(UsageError, match=says):
        list(TextSource(list_sources([tmp_path])).records())


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(os.urandom(5000).hex().encode())[:-900])
    with pytest.raises(UsageError, match=r"a\.gz: damaged gzip"):
        list(TextSource(list_sources([tmp_path / "a.gz"])).records())


def test_binary_files_are_left_out_unless_named(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "text").write_bytes(b"text")
    walked = TextSource(list_sources([tmp_path]))
    assert [r.document for r in walked.records()] == ["text"]
    assert walked.skipped == {"image"}
    assert [r.data for r in TextSource(list_sources([tmp_path / "image"])).records()] == [b"\x89PNG\0\0"]


def test_listing_has_one_order_and_leaves_out_the_hidden(tmp_path: Path) -> None:
    for name in ["b", "a/z", "a.txt", ".git/config", "é", "a/.hidden"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert [file.name for file in list_sources([tmp_path])] == ["a.txt", "a/z", "b", "link", "é"]
    again = list_sources([tmp_path / "b", tmp_path / "a", tmp_path / "b"])
    assert [file.name for file in again] == ["a/z", "b"]


def test_names_survive_a_move_of_the_corpus(tmp_path: Path) -> None:
    for root in ("here", "there"):
        for name in ("x/1.txt", "y/2.txt"):
            (tmp_path / root / name).parent.mkdir(parents=True)
            (tmp_path / root / name).write_bytes(b"same")
    listings = [
        [f.name for f in list_sources([tmp_path / r / "x", tmp_path / r / "y"])] for r in ("here", "there")
    ]
    assert listings[0] == listings[1] == ["x/1.txt", "y/2.txt"]


def test_a_name_that_is_not_utf8_is_still_a_name(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_bytes(b"x")
    (file,) = list_sources([tmp_path])
    assert file.name == "\\xff.txt"
    assert [r.data for r in TextSource((file,)).records()] == [b"x"]


def test_what_resuming_can_notice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"0123456789"))
    source = TextSource(list_sources([tmp_path]))
    for name in ("a.txt", "b.txt.gz"):
        with pytest.raises(RefusedError, match="shorter than when this producer stopped"):
            list(source.records(Place(name, 11, 0)))
    with pytest.raises(RefusedError, match=r"gone\.txt.*not among the inputs"):
        list(source.records(Place("gone.txt", 0, 0)))


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_a_file_that_only_has_the_name_of_the_one_before_is_refused(tmp_path: Path, suffix: str) -> None:
    def source(data: bytes) -> TextSource:
        (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        return TextSource(list_sources([tmp_path]))

    text = TEXT * 4000
    for offset in (1, len(TEXT), len(text)):
        place = Place(f"a.{suffix}", offset, 0)
        head = source(text[:offset]).head(place)
        source(text).check(place, head)  # what follows does not matter
        source(b"x" + text).check(place, "")  # nor anything to a position of an older version
        with pytest.raises(RefusedError, match="does not begin like"):
            source(b"x" + text).check(place, head)


def test_a_file_that_grows_while_it_is_read_can_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    source = TextSource(list_sources([tmp_path]))
    source.head(Place("a.txt", 50, 0))
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    later = Place("a.txt", 900, 0)
    TextSource(list_sources([tmp_path])).check(later, source.head(later))


def test_bad_inputs(tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match="no such file"):
        list_sources([tmp_path / "missing"])
    with pytest.raises(UsageError, match="no input"):
        list_sources([])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a directory"):
        list_sources([tmp_path / "pipe"])
    for index, count in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(UsageError, match="shard"):
            Shard(index, count)
