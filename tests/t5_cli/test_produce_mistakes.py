"""What a mistyped or repeated `stepfs-produce text` must not break: a live producer, the source's bytes, a new lake."""

from __future__ import annotations

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import trio
from test_produce_text import corpus, own_cache, produce, refused, running

from stepfs.errors import UsageError
from stepfs_producer.cli.ensure_lake import ensure_lake

__all__ = ["corpus", "own_cache"]  # fixtures


@pytest.mark.parametrize(
    ("mistake", "says"),
    [(["--shard", "0/2"], "continue it with"), (["--tokenizer", "bpe"], "tokens of bytes")],
)
def test_a_mistyped_command_does_not_fence_the_producer_at_work(
    file_url: str, corpus: Path, mistake: list[str], says: str
) -> None:
    first = running(file_url, corpus)
    refused(produce(file_url, "-i", corpus, "--producer-id", "text-0-of-1", *mistake), 4, says)
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    _, err = first.communicate(timeout=100)
    assert first.returncode == 143, err


def test_another_file_of_the_same_name_does_not_lose_its_beginning(file_url: str, tmp_path: Path) -> None:
    for year, text in (("y24", "first\n" * 7), ("y25", "second\n" * 70)):
        (tmp_path / year).mkdir()
        (tmp_path / year / "train.txt").write_text(text)
    options = ["--slices", 1, "--seq-len", 16, "--ext", ".bin"]
    assert produce(file_url, "-i", tmp_path / "y24/train.txt", *options).returncode == 0
    second = ["-i", tmp_path / "y25/train.txt", *options]
    refused(produce(file_url, *second), 4, "y25/train.txt does not begin like", "new producer id")
    done = produce(file_url, *second, "--producer-id", "y25", "--json")
    assert json.loads(done.stdout)["run"]["source_bytes"] == 490


def test_an_extension_that_cannot_be_made_does_not_become_that_of_a_lake(file_url: str) -> None:
    def check(ext: str) -> None:
        raise UsageError(f"{ext} needs torch")

    with pytest.raises(UsageError, match=r"\.safetensors needs torch"):
        trio.run(partial(ensure_lake, file_url, 1, None, None, check_ext=check))
    assert not Path(file_url.removeprefix("file://"), "lake.msgpack").exists()
