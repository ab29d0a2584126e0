"""The files of a source: found, named, frozen, and refused by name when they are not the ones that were listed (P7)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from sourced import blocks, laid_out, source, values

from stepfs.errors import AbsentError, CorruptError, RefusedError, StepfsError, UsageError
from stepfs.format.keys import plan_key, source_listing_key
from stepfs.format.planned import Listing, from_shards, shard_count
from stepfs_producer.sources import files as opened
from stepfs_producer.sources.files import _matches
from stepfs_producer.sources.listing import list_corpus, located
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


def test_an_unknown_format_is_refused(root) -> None:
    with pytest.raises(UsageError, match="unknown format 'jsonlines'; write one of jsonl, text, parquet, megatron"):
        list_corpus(source(root, form="jsonlines"))


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
    with pytest.raises(RefusedError, match=rf"b\.jsonl {CHANGES[change]}.*restore it, or give the source a new name"):
        located(before, list_corpus(spec), "code")


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_since_it_was_listed_is_refused_by_name(root, change) -> None:
    spec = source(root / "web")
    layout = laid_out(spec)
    change(root / "web/b.jsonl")
    opened._checked.clear()
    with pytest.raises(RefusedError, match=rf"b\.jsonl {CHANGES[change]}.*restore it, or give the source a new name"):
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
