"""What `show` and its neighbours are given by mistake: one line, exit code 2, and nothing that waits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from lakes import stepfs
from payload_samples import npy, pt


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """Nobody writes to it: opening it would wait for ever."""
    os.mkfifo(tmp_path / "fifo.npy")
    return tmp_path / "fifo.npy"


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_refused_and_not_opened(fifo: Path, tmp_path: Path) -> None:
    (tmp_path / "link.npy").symlink_to(fifo)
    (tmp_path / "directory.npy").mkdir()
    for target in (fifo, tmp_path / "link.npy", "/dev/zero"):
        ended = stepfs("show", target)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
        assert f"{target}: is not a regular file" in ended.err
    ended = stepfs("show", tmp_path / "directory.npy")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    made = stepfs("init", f"file://{tmp_path}/lake", "--slices", 1, "--ext", ".npy", "--from-payload", fifo)
    assert (made.code, made.err.count("\n")) == (2, 1)
    assert "is not a regular file" in made.err


@pytest.mark.parametrize("option", [["--step", 0], ["--rank", 0], ["--rank", 5], ["--micro", 1]])
def test_options_of_lakes_are_refused_for_a_file(tmp_path: Path, option: list[object]) -> None:
    (tmp_path / "x.npy").write_bytes(npy(np.zeros(2)))
    ended = stepfs("show", tmp_path / "x.npy", *option)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert f"{option[0]} is for lakes" in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "{file}", "--tokenizer", ""], "--tokenizer: is empty; give `bytes`, or"),
        (["init", "{lake}", "--slices", 1, "--payload-schema", ""], "--payload-schema: is empty; name a file"),
        (["init", "{lake}", "--slices", 1, "--from-payload", ""], "--from-payload: is empty; name a file"),
    ],
)  # fmt: skip
def test_an_option_without_a_name_is_one_clear_line(file_url, tmp_path, arguments, words):
    (tmp_path / "x.npy").write_bytes(npy(np.zeros(2, np.int32)))
    places = {"{lake}": file_url, "{file}": tmp_path / "x.npy"}
    ended = stepfs(*(places.get(str(each), each) for each in arguments))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert words in ended.err
    assert "file://" not in ended.err


def test_show_shows_a_dash_for_values_that_it_does_not_know(tmp_path: Path) -> None:
    number = torch.tensor([1 + 2j])
    (tmp_path / "x.pt").write_bytes(pt({"x": number.conj(), "y": torch.eye(2).t(), "raw": b"jpeg"}))
    ended = stepfs("show", tmp_path / "x.pt")
    assert (ended.code, ended.err) == (0, "")
    assert [line.split() for line in ended.out.splitlines()[2:]] == [
        ["x", "complex64", "[1]", "-"],
        ["y", "float32", "[2,", "2]", "-"],
        ["raw:", "4", "bytes"],
    ]
