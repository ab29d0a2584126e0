"""`stepfs-produce text` as a program: what it writes, how it continues, and what it refuses."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import safetensors.numpy
import torch
import trio
from typer.testing import CliRunner

from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer.cli.app import app
from stepfs_producer.producer import AsyncProducer
from stepfs_producer.run import session

PROGRAM = str(Path(sysconfig.get_path("scripts")) / "stepfs-produce")
END, PADDING = 256, 257
RAW = ["--slices", 1, "--ext", ".bin", "--seq-len", 48]


def produce(lake: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In this process: starting one takes longer than what most tests have to say."""
    command = ["text", lake, *map(str, arguments)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


def produce_in_a_process(lake: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, "text", lake, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def committed(lake: str) -> list[tuple[str, list[bytes]]]:
    """(producer, payloads) of every step, in the lake's order."""

    async def read() -> list[tuple[str, list[bytes]]]:
        store = open_store(lake)
        log = await LogReader.open(store, await open_lake(store))
        steps = []
        for number in range(log.state.next_step):
            entry = await log.entry(Step(number))
            data = await store.get(entry.tgb.key)
            assert data is not None
            refs = [entry.tgb.slice(SliceIndex(n)) for n in range(entry.tgb.slices)]
            steps.append((entry.producer_id, [data[ref.offset : ref.offset + ref.length] for ref in refs]))
        await store.aclose()
        return steps

    return trio.run(read)


def ids_of(payload: bytes, ext: str) -> list[int]:
    """The tokens of a file, row after row."""
    if ext == ".bin":
        return np.frombuffer(payload, "<u2").tolist()
    if ext == ".npy":
        return np.load(io.BytesIO(payload))[0].ravel().tolist()
    if ext == ".tar":
        with tarfile.open(fileobj=io.BytesIO(payload)) as archive:
            rows = [archive.extractfile(name) for name in archive if name.name.endswith(".input_ids.npy")]
            return [number for row in rows if row for number in np.load(io.BytesIO(row.read())).tolist()]
    if ext == ".pt":
        return torch.load(io.BytesIO(payload), weights_only=True)["input_ids"].flatten().tolist()
    return safetensors.numpy.load(payload)["input_ids"].ravel().tolist()


def text_in(lake: str, ext: str = ".bin", producer: str | None = None) -> list[int]:
    """The tokens of all steps in the order of the text, without the padding at their end."""
    ids = [
        number
        for name, payloads in committed(lake)
        if producer in {None, name}
        for payload in payloads
        for number in ids_of(payload, ext)
    ]
    while ids and ids[-1] == PADDING:
        ids.pop()
    return ids


def documents_in(ids: list[int]) -> list[bytes]:
    """Byte tokens → documents."""
    assert ids[-1] == END
    ends = [-1, *np.flatnonzero(np.array(ids) == END).tolist()]
    return [bytes(ids[before + 1 : end]) for before, end in pairwise(ends)]


def texts_of(corpus: Path) -> list[bytes]:
    return [text for path in sorted(corpus.iterdir()) if (text := path.read_bytes())]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for n in range(30):
        (root / f"{n:02d}.txt").write_text(f"document {n} says hello\n" * (n * 7 % 40))
    return root


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
    first, second, where = done.stderr.splitlines()
    assert first == "stepfs-produce: skipped: source text, 0/b.png at 0: a NUL byte, so it is no text"
    assert "0/c.txt at 0: not UTF-8" in second
    assert "listed in" in where
    assert "(2 records skipped)" in done.stdout


def test_a_lake_may_be_sealed_with_the_text(file_url: str, corpus: Path) -> None:
    assert "the lake is sealed" in produce(file_url, "-i", corpus, *RAW, "--seal").stdout
    refused(produce(file_url, "-i", corpus, *RAW), 4, "sealed")


def refused(done: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("stepfs-produce: ")
    for words in says:
        assert words in done.stderr
    assert done.stderr.count("\n") == 1 or "the plan changed" in done.stderr


def test_what_is_refused_is_one_line_and_creates_no_lake(file_url: str, corpus: Path) -> None:
    fine = ["-i", corpus, "--slices", 2, "--seq-len", 64]
    nowhere = ["-i", corpus / "nowhere", "--slices", 2]
    refused(produce_in_a_process(file_url, *nowhere), 3, "no such file or directory")
    refused(produce(file_url, *nowhere), 3, "no such file or directory")
    refused(produce(file_url, "-i", corpus), 2, "give --slices N to create it")
    refused(produce(file_url, *fine, "--ext", ".parquet"), 2, ".parquet", ".safetensors")
    refused(produce(file_url, *fine, "--shard", "2/2"), 2, "shard 2/2 does not exist")
    refused(produce(file_url, *fine, "--shard", "half"), 2, "write i/n")
    refused(produce(file_url, *fine, "--batch-size", 1 << 17), 2, "micro_batches: 131072 is out of range")
    refused(produce(file_url, *fine, "--tokenizer-file", corpus / "none.json"), 3, "no such tokenizer file")
    refused(produce("gopher://x", *fine), 2, "gopher")
    refused(produce("some/dir", *fine), 2, "not a lake")
    refused(produce("some/dir", *fine, "--ext", ".bin"), 2, "a lake is a URL")
    assert not Path(file_url.removeprefix("file://")).exists()


def test_a_lake_of_another_shape_or_stream_is_refused(file_url: str, corpus: Path, tmp_path: Path) -> None:
    fine = ["-i", corpus, "--seq-len", 48]
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 1).returncode == 0
    before = committed(file_url)
    refused(produce(file_url, *fine, "--slices", 3), 4, "has 1 slices", "--slices 1")
    refused(produce(file_url, *fine, "--ext", ".npy"), 4, "holds .bin files")
    for other, shape in ((["--seq-len", 100], "[8, 100]"), (["--batch-size", 3], "[3, 48]")):
        refused(produce(file_url, *fine, *other), 4, "[8, 48]", shape)
        refused(produce(file_url, *fine, *other, "--producer-id", "beside"), 4, "[8, 48]", shape)
    other_shard = ["--shard", "0/2", "--producer-id", "text-0-of-1"]
    refused(produce(file_url, *fine, *other_shard), 4, "the plan changed", "sources.text.shard: 0/1 → 0/2")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    refused(produce(file_url, *fine, "-i", tmp_path / "rows.jsonl"), 2, "name one kind")
    (corpus / "01.txt").write_text("another beginning\n" * 7)
    refused(produce(file_url, *fine), 4, "01.txt is shorter than when this plan began")
    for path in list(corpus.iterdir()):
        path.rename(path.with_suffix(".moved"))
    refused(produce(file_url, *fine), 4, "00.txt is gone")
    assert committed(file_url) == before


def test_a_lake_without_a_schema_keeps_the_shape_of_a_producer(file_url: str, corpus: Path) -> None:
    from lakes import stepfs  # noqa: PLC0415

    assert stepfs("init", file_url, "--slices", 1, "--ext", ".bin").code == 0
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 1).returncode == 0
    changed = produce(file_url, "-i", corpus, "--seq-len", 64)
    refused(changed, 4, "stages[0].sequence_length: 48 → 64", "name another --producer-id")
    assert produce(file_url, "-i", corpus, *RAW, "--limit-steps", 2).returncode == 0


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


def test_options_come_from_the_environment_too(
    file_url: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    )
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


def model_file(path: Path, end: str) -> Path:
    """A byte-level BPE as Qwen's, its end of a document above the vocabulary."""
    vocabulary = {chr(byte): byte - 0x21 for byte in range(0x21, 0x7F)} | {"Ġ": 94, "Ċ": 95}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 96, "content": end, **flags}],
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }
        )
    )
    return path
