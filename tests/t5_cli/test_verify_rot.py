"""`stepfs verify` names the object that has rotted, whichever it is and however it happened."""

from __future__ import annotations

import random

import pytest
import rottenlake
from lakes import stepfs

# What comes last in its sequence is not missed: without it the lake is what it was before. Nobody's data hangs on a
# node's record, and a group that nobody remembers needs nothing.
UNSEEN = {"consumers", "nodes", "floor", "log"}


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rot") / "intact"
    rottenlake.build(directory)
    return directory


def test_nothing_is_wrong_with_the_lake_that_is_spoilt_below(intact):
    ended = stepfs("verify", intact.as_uri(), "--json")
    assert ended.document == {"steps": 24, "slices": 24, "errors": []}


@pytest.mark.logs("is unreadable, using an older one", "cannot follow|is damaged|cannot be read")
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("kind", rottenlake.KINDS)
def test_the_object_is_named(intact, tmp_path, kind, how):
    lake = tmp_path / "lake"
    rottenlake.copy(intact, lake)
    keys = rottenlake.objects(lake)[kind]
    for number, key in enumerate(keys):
        chance = random.Random(f"{kind}/{how}/{number}")
        body = rottenlake.spoil(lake / key, how, chance)
        ended = stepfs("verify", lake.as_uri(), "--json")
        told = ended.out + ended.err
        if how == "delete" and kind in UNSEEN and key == keys[-1]:
            assert ended.code in {0, 5}, told
        elif kind == "snapshot" and how == "delete":
            assert ended.code == 5
            assert "restore the newest object under snapshot/" in told
        else:
            assert ended.code == (3 if (kind, how) == ("lake.msgpack", "delete") else 5), f"{key}: {told}"
            assert key in told
        rottenlake.restore(lake / key, body)
    assert stepfs("verify", lake.as_uri()).code == 0
