"""`stepfs-produce text` as a program: what it writes, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import json_schemas
import pytest
import trio
from typer.testing import CliRunner

from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer.cli.app import app
from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.records import Shard, TextSource
from stepfs_producer.text.steps import Shape, TextPosition, text_steps
from stepfs_producer.transforms.tokenize import ByteTokenizer, load_bpe

PROGRAM = str(Path(sysconfig.get_path("scripts")) / "stepfs-produce")


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


def planned(root: Path, shape: Shape, shard: Shard) -> list[list[bytes]]:
    start = TextPosition(shard, "bytes")
    source = TextSource(list_sources([root]), shard=shard)
    return [step.payloads for step in text_steps(source, ByteTokenizer(), shape, start)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    root.mkdir()
    for n in range(30):
        (root / f"{n:02d}.txt").write_text(f"document {n} says hello\n" * (n * 7 % 40))
    return root


@pytest.mark.parametrize("ext", [".pt", ".safetensors", ".npy", ".tar", ".bin"])
def test_the_lake_holds_exactly_what_was_planned(file_url: str, corpus: Path, ext: str) -> None:
    start = produce_in_a_process if ext == ".pt" else produce
    done = start(
        file_url, "-i", corpus, "--slices", 2, "--seq-len", 64, "--batch-size", 3, "--ext", ext, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no terminal, no progress bar
    plan = planned(corpus, Shape(2, 3, 64, ext), Shard())
    assert committed(file_url) == [("text-0-of-1", payloads) for payloads in plan]
    summary = json.loads(done.stdout)
    json_schemas.check("produce-text", summary)
    total = sum(path.stat().st_size for path in corpus.iterdir())
    documents = sum(path.stat().st_size > 0 for path in corpus.iterdir())
    assert summary["ending"] == "complete"
    assert summary["total"] == summary["run"]
    assert summary["total"]["steps"] == len(plan)
    assert summary["total"]["source_bytes"] == total
    assert summary["total"]["documents"] == documents
    assert summary["total"]["tokens"] == total + documents


def test_two_producers_that_start_at_once_share_one_lake(lake_url: str, corpus: Path) -> None:
    shared = ["-i", str(corpus), "--slices", "1", "--seq-len", "64", "--ext", ".bin"]
    both = [subprocess.Popen([PROGRAM, "text", lake_url, *shared, "--shard", f"{i}/2"]) for i in range(2)]
    assert [process.wait(100) for process in both] == [0, 0]
    steps = committed(lake_url)
    for i in range(2):
        mine = [payloads for producer, payloads in steps if producer == f"text-{i}-of-2"]
        assert mine == planned(corpus, Shape(1, 8, 64, ".bin"), Shard(i, 2))


def test_the_limit_counts_earlier_runs(file_url: str, corpus: Path) -> None:
    arguments = ["-i", corpus, "--slices", 1, "--seq-len", 32, "--ext", ".bin", "--json"]
    endings = []
    for limit in (3, 3, 5):
        done = json.loads(produce(file_url, *arguments, "--limit-steps", limit).stdout)
        endings.append((done["ending"], done["run"]["steps"], done["total"]["steps"]))
    assert endings == [("limit", 3, 3), ("limit", 0, 3), ("limit", 2, 5)]
    assert produce(file_url, *arguments).returncode == 0
    plan = planned(corpus, Shape(1, 8, 32, ".bin"), Shard())
    assert [payloads for _, payloads in committed(file_url)] == plan
    again = json.loads(produce(file_url, *arguments).stdout)
    assert (again["ending"], again["run"]["steps"]) == ("complete", 0)


def running(lake: str, corpus: Path) -> subprocess.Popen[str]:
    """A slow producer that has committed something."""
    command = [PROGRAM, "text", lake, "-i", str(corpus), "--slices", "1", "--seq-len", "16", "--ext", ".bin"]
    process = subprocess.Popen(
        [*command, "--steps-per-second", "5"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not list(Path(lake.removeprefix("file://")).glob("*/log/*1")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_between_two_steps(
    file_url: str, corpus: Path, number: signal.Signals, code: int
) -> None:
    process = running(file_url, corpus)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert err.count("\n") == 1
    assert "stopping as soon as what was appended is committed" in err
    assert "all committed" in out
    assert "run the same command again" in out
    before = len(committed(file_url))
    assert f"text-0-of-1: {before} steps" in out
    assert produce(file_url, "-i", corpus, "--seq-len", 16).returncode == 0
    assert [payloads for _, payloads in committed(file_url)] == planned(
        corpus, Shape(1, 8, 16, ".bin"), Shard()
    )


def test_a_second_process_of_the_same_id_fences_the_first(file_url: str, corpus: Path) -> None:
    first = running(file_url, corpus)
    second = produce_in_a_process(file_url, "-i", corpus, "--seq-len", 16)
    _, err = first.communicate(timeout=100)
    assert second.returncode == 0
    assert first.returncode == 7, err
    assert "Traceback" not in err
    assert [payloads for _, payloads in committed(file_url)] == planned(
        corpus, Shape(1, 8, 16, ".bin"), Shard()
    )


def test_a_bpe_is_trained_once_and_shared_by_the_shards(file_url: str, corpus: Path, tmp_path: Path) -> None:
    model = tmp_path / "bpe.json"
    for i in range(2):
        arguments = [
            "--tokenizer",
            "bpe",
            "--vocab-size",
            300,
            "--tokenizer-file",
            model,
            "--shard",
            f"{i}/2",
        ]
        done = produce(
            file_url, "-i", corpus, "--slices", 1, "--seq-len", 32, "--ext", ".bin", "--json", *arguments
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tokenizer"] == load_bpe(model).identity
    tokenizer = load_bpe(model)
    found = set()
    for _, payloads in committed(file_url):
        ids = [int.from_bytes(payloads[0][at : at + 2], "little") for at in range(0, len(payloads[0]), 2)]
        assert max(ids) < tokenizer.vocabulary
        found |= set(ids)
    assert max(found - {tokenizer.end, tokenizer.padding}) > 256
    fresh = ["--slices", 1, "--tokenizer", "bpe", "--vocab-size", 280]
    cached = produce(f"{file_url}-cached", "-i", corpus, *fresh)
    assert cached.returncode == 0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all(path.parent.name == "tokenizers" and path.suffix == ".json" for path in left)


def refused(done: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("stepfs-produce: ")
    assert done.stderr.count("\n") == 1
    for words in says:
        assert words in done.stderr


def test_what_is_refused_is_one_line_and_creates_no_lake(file_url: str, corpus: Path) -> None:
    fine = ["-i", corpus, "--slices", 2, "--seq-len", 64]
    nowhere = ["-i", corpus / "nowhere", "--slices", 2]
    refused(produce_in_a_process(file_url, *nowhere), 3, "no such file or directory")
    refused(produce(file_url, *nowhere), 3, "no such file or directory")
    refused(produce(file_url, "-i", corpus), 2, "give --slices N to create it")
    refused(produce(file_url, *fine, "--ext", ".parquet"), 2, ".parquet", ".safetensors")
    refused(produce(file_url, *fine, "--shard", "2/2"), 2, "shard 2/2 does not exist")
    refused(produce(file_url, *fine, "--shard", "half"), 2, "write I/N")
    refused(produce(file_url, *fine, "--steps-per-second", "0"), 2, "above 0")
    refused(produce(file_url, *fine, "--tokenizer", "bpe", "--vocab-size", 12), 2, "too small")
    refused(produce("gopher://x", *fine), 2, "gopher")
    refused(produce("some/dir", *fine), 2, "not a lake")
    assert not Path(file_url.removeprefix("file://")).exists()


def test_a_lake_of_another_shape_or_stream_is_refused(file_url: str, corpus: Path) -> None:
    fine = ["-i", corpus, "--seq-len", 64]
    assert produce(file_url, *fine, "--slices", 2, "--ext", ".bin", "--limit-steps", 1).returncode == 0
    before = committed(file_url)
    refused(produce(file_url, *fine, "--slices", 3), 4, "has 2 slices", "--slices 2")
    refused(produce(file_url, *fine, "--ext", ".npy"), 4, "holds .bin files")
    refused(
        produce(file_url, *fine, "--shard", "0/2", "--producer-id", "text-0-of-1"),
        4,
        "continue it with --shard 0/1",
    )
    for path in list(corpus.iterdir()):
        path.rename(path.with_suffix(".moved"))
    refused(produce(file_url, *fine), 4, "not among the inputs any more")
    assert committed(file_url) == before


def test_options_come_from_the_environment_too(
    file_url: str, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPFS_INPUT", f"{corpus / '05.txt'}:{corpus / '06.txt'}")
    for name, value in {
        "SLICES": "3",
        "SEQ_LEN": "32",
        "EXT": ".npy",
        "PRODUCER_ID": "named",
        "JSON": "1",
    }.items():
        monkeypatch.setenv(f"STEPFS_{name}", value)
    done = produce_in_a_process(file_url)
    assert json.loads(done.stdout)["producer"] == "named"
    assert {len(payloads) for _, payloads in committed(file_url)} == {3}


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
