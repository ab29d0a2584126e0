"""`stepfs-produce text` as a program: what it writes, and how it continues."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.numpy
from committed import committed
from finished import ran
from produced_text import (
    END,
    PROGRAM,
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


@pytest.mark.parametrize("ext", [".pt", ".safetensors", ".npy", ".tar", ".bin"])
def test_the_lake_holds_the_text_end_to_end(file_url: str, corpus: Path, ext: str) -> None:
    start = produce_in_a_process if ext == ".pt" else produce
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


def test_two_producers_that_start_at_once_share_one_lake(lake_url: str, corpus: Path) -> None:
    shared = ["-i", str(corpus), "--slices", "1", "--seq-len", "64", "--batch-size", "1", "--ext", ".bin"]
    both = [subprocess.Popen([PROGRAM, "text", lake_url, *shared, "--shard", f"{i}/2"]) for i in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    parts = [documents_in(text_in(lake_url, producer=f"text-{i}-of-2")) for i in range(2)]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(texts_of(corpus))


def test_the_limit_counts_earlier_runs(file_url: str, corpus: Path) -> None:
    arguments = ["-i", corpus, "--slices", 1, "--seq-len", 32, "--ext", ".bin"]
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
    refused(produce(file_url, "-i", corpus, *RAW, "--producer-id", "another"), 4, "sealed")


def test_options_come_from_the_environment_too(file_url, corpus, monkeypatch):
    monkeypatch.setenv("STEPFS_INPUT", f"{corpus / '05.txt'} {corpus / '06.txt'}")
    for name, value in {"SLICES": "3", "SEQ_LEN": "32", "EXT": ".npy", "PRODUCER_ID": "named"}.items():
        monkeypatch.setenv(f"STEPFS_{name}", value)
    assert produce_in_a_process(file_url).stdout.startswith("named: ")
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
