"""`.pt` payloads that map, and resume state that refuses another lake."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from stepfs import StreamState
from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs.format.commit import Origin
from stepfs.format.ids import Step
from stepfs.format.snapshot import genesis
from stepfs.torch import dump


def state(**changes: object) -> dict[str, object]:
    return {"lake_id": "a" * 32, "next_step": 42, "slices": 8, **changes}


def test_dump_is_a_pt_file_that_torch_maps(tmp_path):
    batch = {"input_ids": torch.arange(1000), "name": "x"}
    (tmp_path / "x.pt").write_bytes(dump(batch))
    loaded = torch.load(tmp_path / "x.pt", mmap=True)
    assert torch.equal(loaded["input_ids"], batch["input_ids"])
    assert loaded["name"] == "x"


def test_state_goes_through_a_checkpoint(tmp_path):
    before = StreamState(lake_id="a" * 32, slices=8)
    before.next_step = 42
    torch.save(before.state_dict(), tmp_path / "checkpoint.pt")
    after = StreamState(lake_id="a" * 32, slices=8)
    after.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    assert after.next_step == 42
    assert before.state_dict() == state()


@pytest.mark.parametrize(
    ("loaded", "error", "reason"),
    [
        (state(lake_id="b" * 32), RefusedError, "mount that lake"),
        (state(slices=16), RefusedError, "16 slices"),
        (state(next_step=-1), UsageError, "next_step"),
        (state(next_step=True), UsageError, "next_step"),
        (state(next_step=1.0), UsageError, "next_step"),
        ({}, UsageError, "next_step"),
    ],
)
def test_state_of_something_else_is_refused_and_changes_nothing(loaded, error, reason):
    stream = StreamState(lake_id="a" * 32, slices=8, next_step=7)
    with pytest.raises(error, match=reason):
        stream.load_state_dict(loaded)
    assert stream.next_step == 7


def test_a_fork_goes_on_from_a_checkpoint_of_its_parent_before_the_first_step_that_it_left_out():
    fork = StreamState(lake_id="a" * 32, slices=8, origins={"b" * 32: 12, "c" * 32: 9})
    fork.load_state_dict(state(lake_id="b" * 32, next_step=12))
    assert fork.state_dict() == state(next_step=12), "from here on it is a state of the fork"
    for lake, step in (("b", 13), ("c", 10), ("d", 0)):
        with pytest.raises(RefusedError, match=f"resume from a checkpoint at {step - 1}|mount that lake"):
            fork.load_state_dict(state(lake_id=lake * 32, next_step=step))


@pytest.mark.parametrize(
    ("skip_first", "skip_end", "end", "cut"),
    [(5, 8, 9, 5), (5, 5, 9, 9), (12, 15, 9, 9), (3, 2**50, 3, 3), (4, 4, 4, 4)],
)
def test_the_cut_of_a_fork_is_the_first_step_that_it_left_out_or_made(skip_first, skip_end, end, cut):
    def origin(number, *steps):
        return Origin("file:///x", f"{number:032x}", *map(Step, steps))

    parent, grandparent = origin(1, skip_first, skip_end, end), origin(2, 6, 7, 20)
    fork = replace(genesis("f" * 32, 8), origins=(parent, grandparent))
    assert fork.origin_cuts == {parent.lake_id: cut, grandparent.lake_id: min(cut, 6)}


def test_identity_comes_from_the_mount(tmp_path):
    with pytest.raises(AbsentError, match="not a stepfs mount"):
        StreamState.of_mount(tmp_path)
    (tmp_path / ".stepfs").mkdir()
    status = {"lake_id": "a" * 32, "slices": 8, "world": 16, "origins": {}}
    (tmp_path / ".stepfs" / "status.json").write_text(json.dumps(status))
    for world in (None, 16):
        stream = StreamState.of_mount(tmp_path, world=world)
        assert (stream.lake_id, stream.slices, stream.next_step) == ("a" * 32, 8, 0)
    with pytest.raises(RefusedError, match=r"shows 16 ranks, the trainer has 8: .* --world 8"):
        StreamState.of_mount(tmp_path, world=8)
