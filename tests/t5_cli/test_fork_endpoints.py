"""`--endpoint-url` means the lake of the command line: the parent of a fork lies where its own profile says."""

from __future__ import annotations

import pytest
from lakes import SLICES, commit, stepfs

from stepfs.store import opening


@pytest.mark.parametrize(
    ("command", "code"),
    [(["show", "--step", 0], 5), (["lineage", "--step", 0], 5), (["verify"], 0)],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_a_parents_store_is_opened_as_that_of_an_origin(monkeypatch, file_url, tmp_path, command, code):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(2))
    fork = f"file://{tmp_path / 'fork'}"
    assert stepfs("fork", f"{file_url}@2", fork).code == 0
    opened = []
    open_store = opening.open_store

    def noted(url, *, options, silence):
        opened.append((url, options.endpoint_url, options.of_origin))
        return open_store(url, options=options, silence=silence)

    monkeypatch.setattr(opening, "open_store", noted)
    ended = stepfs(command[0], fork, *command[1:], "--endpoint-url", "http://of-the-fork")
    assert ended.code == code, ended.err
    assert set(opened) == {(fork, "http://of-the-fork", False), (file_url, "http://of-the-fork", True)}
