"""Residency as the kernel tells it, on an ordinary file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepfs.data import page_cache

SIZE = 3 * 1024 * 1024 + 100


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as stream:
        stream.write(os.urandom(SIZE))
        stream.flush()
        os.fsync(stream.fileno())
    return path


def file_system(path):
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return next((line.split(" - ")[1].split()[0] for line in lines if line.split()[2] == number), "")


def test_resident_after_writing_and_gone_after_dropping(file):
    assert page_cache.resident_bytes(file, SIZE) == SIZE
    if file_system(file) in {"ext4", "xfs"}:  # the pages of a tmpfs cannot be dropped
        page_cache.drop_pages(file)
        assert page_cache.resident_bytes(file, SIZE) == 0


def test_mincore_agrees_where_cachestat_is_missing(file, monkeypatch):
    hinted = page_cache.resident_bytes(file, SIZE)
    monkeypatch.setattr(page_cache, "_SYS_CACHESTAT", 100_000)
    assert page_cache.resident_bytes(file, SIZE) == hinted


def test_an_empty_file_is_whole(tmp_path, monkeypatch):
    (tmp_path / "empty").touch()
    assert page_cache.resident_bytes(tmp_path / "empty", 0) == 0
    monkeypatch.setattr(page_cache, "_SYS_CACHESTAT", 100_000)
    assert page_cache.resident_bytes(tmp_path / "empty", 0) == 0


def test_every_page_is_marked_used(file):
    if file_system(file) in {"ext4", "xfs"}:
        page_cache.drop_pages(file)
    before = len(os.listdir("/proc/self/fd"))
    page_cache.mark_used(file, SIZE)
    assert page_cache.resident_bytes(file, SIZE) == SIZE, "all of them were visited"
    assert len(os.listdir("/proc/self/fd")) == before


def test_marking_a_file_that_is_shorter_than_told_ends(file):
    page_cache.mark_used(file, 2 * SIZE)
