"""`stepfs-produce text` does not mix row shapes or shardings in one lake, nor keep silent about what it does not read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Self

import pytest
from test_produce_text import committed, corpus, own_cache, produce, produce_in_a_process, refused
from typer.testing import CliRunner

from stepfs.errors import RefusedError
from stepfs_producer import Producer
from stepfs_producer.cli import run_text
from stepfs_producer.cli.app import app

__all__ = ["corpus", "own_cache"]  # fixtures

RAW = ["--slices", 1, "--ext", ".bin", "--seq-len", 48]


def as_older_version(lake: str, producer_id: str) -> None:
    """The newest position of `producer_id` as versions before wrote it: without the keys of today."""
    with Producer(lake, producer_id=producer_id) as producer:
        position = producer.position
        assert isinstance(position, dict)
        older = {key: value for key, value in position.items() if key not in {"shape", "finished"}}
        producer.append([b""], position=older)


@pytest.mark.parametrize(
    ("other", "says"),
    [(["--seq-len", 100], "not 8 of 100"), (["--batch-size", 3], "not 3 of 48")],
)
def test_rows_of_another_shape_are_refused(
    file_url: str, corpus: Path, other: list[object], says: str
) -> None:
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 2).returncode == 0
    refused(
        produce(file_url, "-i", corpus, *RAW, *other), 4, "8 rows of 48", says, "--seq-len 48 --batch-size 8"
    )
    beside = ["--producer-id", "beside"]
    refused(produce(file_url, "-i", corpus, *RAW, *other, *beside), 4, "text-0-of-1", "8 rows of 48", says)
    assert len(committed(file_url)) == 2
    assert produce(file_url, "-i", corpus, *RAW).returncode == 0


def test_the_shape_of_an_older_position_is_unknown_and_accepted(file_url: str, corpus: Path) -> None:
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 1).returncode == 0
    as_older_version(file_url, "text-0-of-1")
    assert produce(file_url, "-i", corpus, *RAW, "--seq-len", 64, "--limit-steps", 3).returncode == 0
    refused(produce(file_url, "-i", corpus, *RAW), 4, "8 rows of 64")


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("limit", [["--limit-steps", 3], []])
def test_the_same_corpus_in_other_shards_is_refused(
    file_url: str, corpus: Path, older: bool, limit: list[object]
) -> None:
    assert produce(file_url, "-i", corpus, *RAW, *limit).returncode == 0
    if older:
        as_older_version(file_url, "text-0-of-1")
    before = len(committed(file_url))
    (corpus / "added later.txt").write_text("new\n")
    for index in range(2):
        resharded = produce(file_url, "-i", corpus, *RAW, "--shard", f"{index}/2")
        refused(resharded, 4, "text-0-of-1", "0/1", f"not {index}/2", "--shard 0/1")
    assert len(committed(file_url)) == before
    assert produce(file_url, "-i", corpus, *RAW).returncode == 0


def test_a_producer_id_of_its_own_does_not_get_around_it(file_url: str, corpus: Path) -> None:
    first = ["--producer-id", "a", "--shard", "1/3", "--limit-steps", 1]
    assert produce(file_url, "-i", corpus, *RAW, *first).returncode == 0
    refused(
        produce(file_url, "-i", corpus, *RAW, "--producer-id", "b"), 4, "a has produced", "1/3", "not 0/1"
    )
    as_older_version(file_url, "a")  # what its corpus was shared into is not looked for by name alone
    assert produce(file_url, "-i", corpus, *RAW, "--producer-id", "b").returncode == 0


def test_another_corpus_may_have_other_shards_also_under_the_same_names(
    file_url: str, tmp_path: Path
) -> None:
    for year in ("y24", "y25"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "train.txt").write_text(f"{year}\n" * 100)
    assert produce(file_url, "-i", tmp_path / "y24", *RAW).returncode == 0
    for index in range(2):
        options = [*RAW, "--shard", f"{index}/2"]
        assert produce(file_url, "-i", tmp_path / "y25", *options).returncode == 0


def test_two_that_begin_together_are_looked_at_again_before_the_first_step(
    file_url: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Overtaken(run_text.Producer):  # type: ignore[name-defined]
        def __enter__(self) -> Self:
            first = produce_in_a_process(file_url, "-i", corpus, *RAW, "--limit-steps", 1)
            assert first.returncode == 0
            return super().__enter__()

    monkeypatch.setattr(run_text, "Producer", Overtaken)
    late = ["text", file_url, "-i", str(corpus), *map(str, RAW), "--shard", "0/2"]
    done = CliRunner().invoke(app, late)
    assert done.exit_code == RefusedError.exit_code, done.output
    assert [producer for producer, _ in committed(file_url)] == ["text-0-of-1"]


def test_a_shard_that_gets_nothing_says_why(file_url: str, tmp_path: Path) -> None:
    root = tmp_path / "equal"
    root.mkdir()
    for name in ("a.txt", "d.txt"):
        (root / name).write_text("the same\n" * 40)
    found = []
    for index in range(2):
        done = produce(file_url, "-i", root, *RAW, "--shard", f"{index}/2", "--json")
        assert done.returncode == 0
        summary = json.loads(done.stdout)
        found.append((summary["total"]["documents"], done.stderr, summary["warnings"]))
    (nothing, said, warnings), (everything, silence, none) = sorted(found)
    assert (nothing, everything, silence, none) == (0, 2, "", [])
    assert said == f"stepfs-produce: warning: {warnings[0]}\n"
    assert "holds none of the 2 records" in warnings[0]
    assert "--shard 0/1" in warnings[0]


def test_finished_files_that_grew_are_named(file_url: str, corpus: Path) -> None:
    (corpus / "07.txt.gz").write_bytes(gzip.compress(b"packed\n" * 9))
    (corpus / "08.jsonl").write_text('{"text": "one"}\n')
    (corpus / "09.pyc").write_bytes(b"\0")
    done = json.loads(produce(file_url, "-i", corpus, *RAW, "--json").stdout)
    assert done["grown_files"] == []
    for name in ("00.txt", "05.txt", "07.txt.gz", "08.jsonl", "09.pyc"):  # 00.txt was empty
        with (corpus / name).open("ab") as file:
            file.write(gzip.compress(b"more\n") if name.endswith(".gz") else b'{"text": "more"}\n')
    expected = ["00.txt", "05.txt", "07.txt.gz", "08.jsonl"]
    for _ in range(2):  # it stays true, and so it stays said
        again = json.loads(produce(file_url, "-i", corpus, *RAW, "--json").stdout)
        assert (again["run"]["steps"], again["grown_files"]) == (0, expected)
    line = produce(file_url, "-i", corpus, *RAW).stdout
    assert "the source is exhausted" in line
    assert "4 files grew after they were finished, and what was added is not read: 00.txt, 05.txt" in line
    with (corpus / "29.txt").open("a") as last:  # where the producer stands, it goes on
        last.write("more\n")
    went_on = json.loads(produce(file_url, "-i", corpus, *RAW, "--json").stdout)
    assert (went_on["run"]["source_bytes"], went_on["grown_files"]) == (5, expected)


def test_files_added_behind_a_producer_are_counted(file_url: str, corpus: Path) -> None:
    assert (
        json.loads(produce(file_url, "-i", corpus, *RAW, "--limit-steps", 3, "--json").stdout)["late_files"]
        == 0
    )
    for name in ("00a.txt", "00b.txt", "zz.txt"):  # the last one comes behind, and is read
        (corpus / name).write_text("added\n")
    (corpus / "00.txt").unlink()  # empty it was
    for _ in range(2):
        done = produce(file_url, "-i", corpus, *RAW, "--json")
        assert (json.loads(done.stdout)["late_files"], done.stderr) == (1, "")
    (corpus / "00.txt").touch()
    line = produce(file_url, "-i", corpus, *RAW).stdout
    assert "2 files were added before zz.txt, where this producer stands, and are not read" in line


def test_another_text_field_is_refused(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "abcd", "body": "efgh"}\n' * 60)
    rows = ["-i", tmp_path / "rows.jsonl", *RAW]
    assert produce(file_url, *rows, "--limit-steps", 1, "--batch-size", 1).returncode == 0
    again = produce(file_url, *rows, "--text-field", "body", "--batch-size", 1)
    refused(again, 4, "'text'", "not 'body'", "--text-field text")
    assert len(committed(file_url)) == 1
    assert produce(file_url, *rows, "--batch-size", 1, "--limit-steps", 2).returncode == 0
    other = [
        "--text-field",
        "body",
        "--producer-id",
        "bodies",
        "--batch-size",
        1,
    ]  # another stream may read it
    assert produce(file_url, *rows, *other, "--limit-steps", 1).returncode == 0


def test_a_text_field_means_nothing_to_plain_text(file_url: str, corpus: Path) -> None:
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 1).returncode == 0
    assert produce(file_url, "-i", corpus, *RAW, "--text-field", "body", "--limit-steps", 2).returncode == 0
    (corpus / "99.jsonl").write_text('{"body": "abcd"}\n' * 60)  # the first that has fields
    assert produce(file_url, "-i", corpus, *RAW, "--text-field", "body").returncode == 0
    refused(produce(file_url, "-i", corpus, *RAW), 4, "'body'", "not 'text'", "--text-field body")
