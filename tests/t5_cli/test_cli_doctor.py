"""doctor on real stores and directories: what it says of them, and how it ends."""

from __future__ import annotations

import re

import pytest
from lakes import SLICES, commit, stepfs


@pytest.fixture
def lake(file_url):
    assert stepfs("init", file_url, "--slices", SLICES).code == 0
    commit(file_url, range(3))
    return file_url


def test_a_lake(lake):
    ended = stepfs("doctor", lake)
    assert ended.code == 0
    for subject in ("python", "pyfuse3", "/dev/fuse", "memory", "conditional create"):
        assert re.search(rf"^ok    {re.escape(subject)} ", ended.out, re.MULTILINE), ended.out


def test_an_absent_lake_fails_with_3_and_says_what_to_do(tmp_path):
    ended = stepfs("doctor", (tmp_path / "nothing").as_uri())
    assert ended.code == 3
    assert re.search("^FAIL  lake .*stepfs init", ended.out, re.MULTILINE)
    assert not (tmp_path / "nothing").exists()


def test_a_directory_that_can_be_mounted_on(tmp_path):
    assert "can be mounted on" in stepfs("doctor", tmp_path).out


def test_directories_that_cannot(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert stepfs("doctor", tmp_path).code == 4
    assert stepfs("doctor", tmp_path / "nothing").code == 3
    assert stepfs("doctor", tmp_path / "file").code == 3
    assert stepfs("doctor", "/proc").code == 4
