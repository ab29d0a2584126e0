"""A fork whose parent was moved, or replaced by another lake: who says so, and what nobody advises."""

from __future__ import annotations

from pathlib import Path

import json_schemas
import pytest
from lakes import SLICES, commit, stepfs

from stepfs import Lake
from stepfs.errors import RefusedError


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, str, str]:
    """The parent's directory, its URL, and that of a fork that shares steps 0 to 2."""
    parent, fork = tmp_path / "parent", (tmp_path / "fork").as_uri()
    assert stepfs("init", parent.as_uri(), "--slices", SLICES, "--ext", ".bin").code == 0
    commit(parent.as_uri(), range(5))
    assert stepfs("fork", f"{parent.as_uri()}@3", fork, "--skip", "3:").code == 0
    commit(fork, range(5, 7))
    return parent, parent.as_uri(), fork


def moved(parent: Path) -> str:
    parent.rename(parent.with_name("elsewhere"))
    return "no lake is there"


def replaced(parent: Path) -> str:
    moved(parent)
    assert stepfs("init", parent.as_uri(), "--slices", SLICES).code == 0
    return f"lake {stepfs('ls', parent.as_uri(), '--json').document['lake_id']} is there"


@pytest.mark.parametrize("lose", [moved, replaced])
def test_it_is_named_and_nobody_advises_to_drop_the_history(places, lose):
    parent, url, fork = places
    shared = stepfs("status", url, "--json").document["lake_id"]
    before = stepfs("status", fork, "--json").document
    assert (before["origins"], before["problems"]) == ([{"url": url, "lake_id": shared, "cut": 3}], [])
    assert stepfs("verify", fork).code == 0
    line = f"this fork shares steps with lake {shared}, which belongs at {url}, and {lose(parent)}: put it back there"

    after = stepfs("status", fork, "--json").document
    json_schemas.check("status-lake", after)
    assert after["problems"] == [line]
    assert f"problem   {line}\n" in stepfs("status", fork).out
    told = [one for one in stepfs("doctor", fork, "--json").document["findings"] if one["subject"] == "origin"]
    assert [(one["level"].lower(), one["detail"]) for one in told] == [("fail", line)]

    found = stepfs("verify", fork, "--json")
    assert found.code == 5
    [error] = found.document["errors"]
    assert error["problem"].startswith("3 steps from 0 to 2 cannot be checked: ")
    assert error["problem"].endswith(line)
    assert found.document["advice"] == []
    assert found.document["steps"] == 2, "the fork's own are checked"

    with Lake(fork, deadline_s=20) as lake:
        assert bytes(lake[3][0])
        with pytest.raises(RefusedError, match=r"data/.*\.tgb: this fork shares steps") as refused:
            bytes(lake[1][0])
        assert line in str(refused.value)
        parent.with_name("elsewhere").rename(parent) if lose is moved else None


def test_it_is_looked_at_once(places, monkeypatch):
    _, url, fork = places
    from stepfs.store.local.local_store import LocalStore  # noqa: PLC0415

    looked, get = [], LocalStore.get

    async def counted(store, key, **options):
        if store.url == url:
            looked.append(key)
        return await get(store, key, **options)

    monkeypatch.setattr(LocalStore, "get", counted)
    with Lake(fork) as lake:
        for step in (0, 1, 2, 1):
            bytes(lake[step][0])
    assert looked == ["lake.msgpack"]
