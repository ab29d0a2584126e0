"""What `show` and its neighbours are given by mistake: one line, exit code 2, and nothing that waits."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from lakes import stepfs
from payload_samples import npy


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


@pytest.mark.parametrize("option", [["--step", 0], ["--rank", 0], ["--rank", 5], ["--micro", 1]])
def test_options_of_lakes_are_refused_for_a_file(tmp_path: Path, option: list[object]) -> None:
    (tmp_path / "x.npy").write_bytes(npy(np.zeros(2)))
    ended = stepfs("show", tmp_path / "x.npy", *option)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert f"{option[0]} is for lakes" in ended.err
