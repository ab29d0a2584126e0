"""`stepfs-produce text` as a program: what it writes, and how it continues."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from typing import Self

import pytest
import safetensors.numpy
import trio
from committed import committed
from finished import ran
from forked import Forked, one_core
from produced_text import (
    END,
    RAW,
    documents_in,
    ids_of,
    model_file,
    produce,
    produce_in_a_process,
    refused,
    text_in,
    texts_of,
)

from stepfs_producer.commit.producer import AsyncProducer
from stepfs_producer.run import session


@pytest.mark.parametrize(
    "ext", [".safetensors", ".bin", *(pytest.param(ext, marks=pytest.mark.nightly) for ext in (".pt", ".npy", ".tar"))]
)
def test_the_lake_holds_the_text_end_to_end(file_url: str, corpus: Path, ext: str) -> None:
    start = produce_in_a_process if ext == ".bin" else produce
    done = start(file_url, "-i", corpus, "--slices", 2, "--seq-len", 64, "--batch-size", 3, "--ext", ext)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no terminal, no progress bar
    steps = committed(file_url)
    assert {producer for producer, _ in steps} == {"text-0-of-1"}
    assert {len(ids_of(payload, ext)) for _, payloads in steps for payload in payloads} == {3 * 64}
    assert documents_in(text_in(file_url, ext)) == texts_of(corpus)
    total = sum(len(text) + 1 for text in texts_of(corpus))
    assert len(steps) == -(-total // (2 * 3 * 64)), "every row is full but those of the last step"
    assert f"{len(steps)} steps in total; {total} tokens" in done.stdout
    assert "every source is exhausted" in done.stdout


def test_a_document_is_one_span_in_each_of_its_rows(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    options = ["--slices", 1, "--seq-len", 16, "--batch-size", 4, "--ext", ".safetensors"]
    assert produce(file_url, "-i", tmp_path / "a.txt", *options).returncode == 0
    [(_, [first]), (_, [second])] = committed(file_url)
    arrays = safetensors.numpy.load(first), safetensors.numpy.load(second)
    assert [span[[0, 1, 2, 7]].tolist() for one in arrays for span in one["spans"]] == [
        [0, 0, 16, 0], [1, 0, 16, 16], [2, 0, 16, 32], [3, 0, 16, 48], [0, 0, 16, 64], [1, 0, 16, 80], [2, 0, 5, 96],
    ]  # fmt: skip
    assert arrays[0]["labels"].ravel().tolist() == [ord("x")] * 64, "also across rows and steps"
    assert arrays[1]["labels"][2].tolist() == [*b"xxx", END, *[-100] * 12]


@pytest.mark.nightly
@pytest.mark.parametrize("lake_url", ["file", "s3"], indirect=True)
def test_two_producers_that_start_at_once_share_one_lake(lake_url: str, corpus: Path) -> None:
    shared = ["-i", corpus, "--slices", 1, "--seq-len", 64, "--batch-size", 4, "--ext", ".bin"]
    both = [Forked("stepfs_producer", "text", lake_url, *shared, "--shard", f"{i}/2", first=one_core) for i in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    parts = [documents_in(text_in(lake_url, producer=f"text-{i}-of-2")) for i in range(2)]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(texts_of(corpus))


def test_the_limit_counts_earlier_runs(file_url: str, corpus: Path) -> None:
    arguments = ["-i", corpus, "--slices", 1, "--seq-len", 32, "--ext", ".bin", "--workers", "1:2", "--memory", "1G"]
    said = []
    for limit in (3, 3, 5):
        said.append(produce(file_url, *arguments, "--limit-steps", limit).stdout)
        assert len(committed(file_url)) == limit
    assert "3 steps in total" in said[0]
    assert "no further step; 3 steps in total; the limit is reached" in said[1]
    corpus.rename(moved := corpus.with_name("moved"))
    assert produce(file_url, "-i", moved, *arguments[2:]).returncode == 0, "a corpus may move"
    assert documents_in(text_in(file_url)) == texts_of(moved)
    again = produce(file_url, "-i", moved, *arguments[2:])
    assert "no further step" in again.stdout
    assert "every source is exhausted" in again.stdout


def test_json_lines_archives_and_files_without_text(file_url: str, corpus: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (rows / "b.ndjson.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    assert produce(f"{file_url}-rows", "-i", rows, *RAW).returncode == 0
    assert documents_in(text_in(f"{file_url}-rows")) == [b"one", b"two", b"three"]
    refused(produce(file_url, "-i", corpus, "-i", rows, *RAW), 2, "name one kind", "a plan with a source")
    for path in corpus.iterdir():
        path.unlink()
    (corpus / "a.txt.gz").write_bytes(gzip.compress(b"packed\n"))
    (corpus / "b.png").write_bytes(b"\x89PNG\0")
    (corpus / "c.txt").write_bytes("größer".encode("latin-1"))
    (corpus / "d.txt").write_text("plain\n")
    done = produce(file_url, "-i", corpus, *RAW)
    assert documents_in(text_in(file_url)) == [b"packed\n", b"plain\n"]
    first, second = done.stderr.splitlines()
    assert first == "stepfs-produce: skipped: source text, 0/b.png at 0: a NUL byte, so it is no text"
    assert "0/c.txt at 0: not UTF-8" in second
    assert "(2 records skipped)" in done.stdout


def test_a_lake_may_be_sealed_with_the_text(file_url: str, corpus: Path) -> None:
    assert "the lake is sealed" in produce(file_url, "-i", corpus, *RAW, "--seal").stdout
    again = produce(file_url, "-i", corpus, *RAW, "--seal")
    assert (again.returncode, "sealed, nothing to do" in again.stdout) == (0, True)
    for path in corpus.iterdir():
        path.write_text(f"another {path.name}")
    refused(produce(file_url, "-i", corpus, *RAW, "--producer-id", "another"), 4, "sealed")


def test_options_come_from_the_environment_too(file_url, corpus, monkeypatch):
    for name, value in {"SLICES": "3", "SEQ_LEN": "32", "EXT": ".npy", "PRODUCER_ID": "named"}.items():
        monkeypatch.setenv(f"STEPFS_{name}", value)
    assert produce(file_url, "-i", corpus / "05.txt", "-i", corpus / "06.txt").stdout.startswith("named: ")
    assert {len(payloads) for _, payloads in committed(file_url)} == {3}
    expected = [(corpus / name).read_bytes() for name in ("05.txt", "06.txt")]
    assert documents_in(text_in(file_url, ".npy")) == expected


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from stepfs_producer.cli.app import app;"
        "assert CliRunner().invoke(app, ['text', '--help']).exit_code == 0;"
        "print([name for name in ('torch', 'boto3', 'numpy', 'rich', 'tokenizers') if name in sys.modules])"
    )
    done = ran([sys.executable, "-c", program], check=True, env={**os.environ})
    assert done.stdout == "[]\n"


def test_a_models_file_is_produced_continued_and_kept(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world\n" * 20)
    (tmp_path / "b.txt").write_text("it ends with <|endoftext|> in the text")
    file = model_file(tmp_path / "tokenizer.json", "<|endoftext|>")
    common = ["-i", tmp_path / "a.txt", "-i", tmp_path / "b.txt", "--seq-len", 16, "--batch-size", 2]
    first = [*common, "--slices", 1, "--ext", ".bin", "--limit-steps", 2]
    assert produce(file_url, *first, "--tokenizer-file", file).returncode == 0
    assert produce(file_url, *common, "--tokenizer-file", file).returncode == 0
    ids = [number for _, (payload,) in committed(file_url) for number in ids_of(payload, ".bin")]
    assert [place for place, number in enumerate(ids) if number == 96][:2] == [240, 240 + 1 + 38]
    other = model_file(tmp_path / "other.json", "</s>")
    refused(produce(file_url, *common, "--tokenizer-file", other), 4, "tokenizer.file")
    file.write_text(other.read_text())
    changed = produce(file_url, *common, "--tokenizer-file", file)
    assert (changed.returncode, "transform or tokenizer changed" in changed.stderr) == (4, True)


def test_what_is_refused_is_one_line_and_creates_no_lake(file_url: str, corpus: Path) -> None:
    fine = ["-i", corpus, "--slices", 2, "--seq-len", 64]
    nowhere = ["-i", corpus / "nowhere", "--slices", 2]
    refused(produce(file_url, *nowhere), 3, "no such file or directory")
    refused(produce(file_url, "-i", corpus), 2, "give --slices N to create it")
    refused(produce(file_url, *fine, "--ext", ".parquet"), 2, ".parquet", ".safetensors")
    refused(produce(file_url, *fine, "--shard", "2/2"), 2, "shard 2/2 does not exist")
    refused(produce(file_url, *fine, "--shard", "half"), 2, "write i/n")
    refused(produce(file_url, *fine, "--batch-size", 1 << 17), 2, "micro_batches: 131072 is out of range")
    refused(produce(file_url, *fine, "--tokenizer-file", corpus / "none.json"), 3, "no such tokenizer file")
    refused(produce("gopher://x", *fine), 2, "gopher")
    refused(produce("some/dir", *fine), 2, "neither a lake nor a mount", "a lake is a URL, such as file://")
    refused(produce("some/dir", *fine, "--ext", ".bin"), 2, "a lake is a URL")
    assert not Path(file_url.removeprefix("file://")).exists()


def test_a_lake_of_another_shape_or_stream_is_refused(file_url: str, corpus: Path, tmp_path: Path) -> None:
    fine = ["-i", corpus, "--seq-len", 48]
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 1).returncode == 0
    before = committed(file_url)
    refused(produce(file_url, *fine, "--slices", 3), 4, "has 1 slices", "--slices 1")
    refused(produce(file_url, *fine, "--ext", ".npy"), 4, "holds .bin files")
    for other, rows in ((["--seq-len", 100], "[8, 100]"), (["--batch-size", 3], "[3, 48]")):
        refused(produce(file_url, *fine, *other), 4, "files with rows [8, 48]", f"makes rows {rows}")
        refused(produce(file_url, *fine, *other, "--producer-id", "beside"), 4, "rows [8, 48]", f"makes rows {rows}")
    other_shard = ["--shard", "0/2", "--producer-id", "text-0-of-1"]
    refused(produce(file_url, *fine, *other_shard), 4, "the plan changed", "sources.text.shard: 0/1 → 0/2")
    refused(produce(file_url, *fine, *other_shard, "--accept-changes"), 4, "source text is not the one", "undo that")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    refused(produce(file_url, *fine, "-i", tmp_path / "rows.jsonl"), 2, "name one kind")
    (corpus / "01.txt").write_text("another beginning\n" * 7)
    refused(produce(file_url, *fine), 4, "01.txt is shorter than when this plan began")
    for path in list(corpus.iterdir()):
        path.rename(path.with_suffix(".moved"))
    refused(produce(file_url, *fine), 4, "00.txt is gone")
    assert committed(file_url) == before


def test_what_is_advised_where_a_file_is_gone_is_accepted_and_nothing_comes_twice(file_url: str, corpus: Path) -> None:
    lines = {name: [f"line {name}{n} of this text" for n in range(300)] for name in "ab"}
    for path in corpus.iterdir():
        path.unlink()
    for name, text in lines.items():
        (corpus / f"{name}.txt").write_text("\n".join(text))
    given = ["-i", corpus, *RAW]
    assert produce(file_url, *given, "--limit-steps", 8).returncode == 0
    (corpus / "b.txt").unlink()
    says = "0/b.txt is gone; restore it, or run again with --accept-changes to go on with what is there"
    refused(produce(file_url, *given), 4, says)
    other = [*given, "--producer-id", "other"]
    for more in ((), ("--accept-changes",), ("--shard", "1/2")):
        refused(
            produce(file_url, *other, *more),
            4,
            "producer text-0-of-1 reads 0/a.txt too; continue that, or leave them out",
        )
    accepted = produce(file_url, *given, "--accept-changes")
    assert (accepted.returncode, "0/b.txt is gone: it gives nothing" in accepted.stderr) == (0, True)
    said = bytes(text_in(file_url)).decode()
    assert said == "\n".join(lines["a"])[: len(said)], "the rest of a begun block is left out, as the warning says"
    (corpus / "a.txt").unlink()
    (corpus / "c.txt").write_text("later files alone")
    assert produce(file_url, *other).returncode == 0
    assert documents_in(text_in(file_url, producer="other")) == [b"later files alone"]


@pytest.mark.parametrize("limit", [["--limit-steps", 3], []])
def test_the_same_corpus_in_other_shards_is_refused(file_url: str, corpus: Path, limit: list[object]) -> None:
    assert produce(file_url, "-i", corpus, *RAW, *limit).returncode == 0
    before = len(committed(file_url))
    for index in range(2):
        resharded = produce(file_url, "-i", corpus, *RAW, "--shard", f"{index}/2")
        refused(resharded, 4, "text-0-of-1", "0/1", f"not {index}/2", "continue with shard 0/1")
    assert len(committed(file_url)) == before
    assert produce(file_url, "-i", corpus, *RAW).returncode == 0


def test_a_producer_id_of_its_own_does_not_get_around_it(file_url: str, corpus: Path) -> None:
    first = ["--producer-id", "a", "--shard", "1/3", "--limit-steps", 1]
    assert produce(file_url, "-i", corpus, *RAW, *first).returncode == 0
    beside = produce(file_url, "-i", corpus, *RAW, "--producer-id", "b")
    refused(beside, 4, "a has produced", "1/3", "not 0/1")


def test_another_corpus_may_have_other_shards_also_under_the_same_names(file_url, tmp_path):
    for year in ("y24", "y25"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "train.txt").write_text(f"{year}\n" * 100)
    assert produce(file_url, "-i", tmp_path / "y24", *RAW).returncode == 0
    for index in range(2):
        options = [*RAW, "--shard", f"{index}/2"]
        assert produce(file_url, "-i", tmp_path / "y25", *options).returncode == 0


def test_two_that_begin_together_are_looked_at_again_before_the_first_step(file_url, corpus, monkeypatch):
    class Overtaken(AsyncProducer):
        async def __aenter__(self) -> Self:
            arguments = (file_url, "-i", corpus, *RAW, "--limit-steps", 1)
            first = await trio.to_thread.run_sync(produce_in_a_process, *arguments)
            assert first.returncode == 0
            return await super().__aenter__()

    monkeypatch.setattr(session, "AsyncProducer", Overtaken)
    refused(produce(file_url, "-i", corpus, *RAW, "--shard", "0/2"), 4, "not 0/2")
    assert [producer for producer, _ in committed(file_url)] == ["text-0-of-1"]


def test_another_file_of_the_same_name_does_not_lose_its_beginning(file_url: str, tmp_path: Path) -> None:
    for year in ("y24", "y25"):
        (tmp_path / year).mkdir()
        (tmp_path / year / "train.txt").write_text(f"{year}\n" * 70)
    assert produce(file_url, "-i", tmp_path / "y24/train.txt", *RAW).returncode == 0
    second = ["-i", tmp_path / "y25/train.txt", *RAW]
    refused(produce(file_url, *second), 4, "y25/train.txt begins otherwise")
    assert produce(file_url, *second, "--producer-id", "y25").returncode == 0
    assert documents_in(text_in(file_url, producer="y25")) == [b"y25\n" * 70]


def test_a_tokenizer_that_names_no_end_gets_it_by_an_option(file_url: str, corpus: Path, tmp_path: Path) -> None:
    model = model_file(tmp_path / "tokenizer.json", "<done>")
    options = ["-i", corpus, "--slices", 1, "--seq-len", 64, "--ext", ".npy"]
    refused(produce(file_url, *options, "--tokenizer-file", model), 2, "(of `text`: --eos TOKEN)", "it has '<done>'")
    refused(produce(file_url, *options, "--eos", "<done>"), 2, "--eos names a token of --tokenizer-file")
    assert produce(file_url, *options, "--tokenizer-file", model, "--eos", "<done>").returncode == 0


def test_rows_of_another_length_name_the_options_that_the_lake_has(file_url: str, corpus: Path) -> None:
    assert produce(file_url, "-i", corpus, "--slices", 1, "--seq-len", 64, "--ext", ".npy").returncode == 0
    refused(produce(file_url, "-i", corpus), 4, "; give --batch-size 8 --seq-len 64, or name another lake")
