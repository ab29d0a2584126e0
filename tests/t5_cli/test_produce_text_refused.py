"""What `stepfs-produce text` refuses: a wrong option, a lake of another shape, a corpus in other shards."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pytest
import trio
from committed import committed
from produced_text import (
    RAW,
    documents_in,
    produce,
    produce_in_a_process,
    refused,
    text_in,
)

from stepfs_producer.commit.producer import AsyncProducer
from stepfs_producer.run import session


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
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    refused(produce(file_url, *fine, "-i", tmp_path / "rows.jsonl"), 2, "name one kind")
    (corpus / "01.txt").write_text("another beginning\n" * 7)
    refused(produce(file_url, *fine), 4, "01.txt is shorter than when this plan began")
    for path in list(corpus.iterdir()):
        path.rename(path.with_suffix(".moved"))
    refused(produce(file_url, *fine), 4, "00.txt is gone")
    assert committed(file_url) == before


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
