"""`stepfs.torch` and the state that a loader keeps."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from stepfs import StreamState
from stepfs.errors import AbsentError, NewerFormatError, RefusedError, UsageError
from stepfs.format.commit import Origin
from stepfs.format.ids import Step
from stepfs.format.snapshot import genesis
from stepfs.payload import read_arrays
from stepfs.torch import dump, torch_bytes

ARRAYS: dict[str, np.ndarray] = {
    "input_ids": np.arange(24, dtype=np.int64).reshape(2, 3, 4),
    "doc_ids": np.arange(6, dtype=np.int32)[::2],  # every second value of what it views
    "spans": np.zeros((0, 6), np.int64),
    "one": np.array(7, np.int32),
}
FACTS = {"sources": ["a.txt", "b\u00e9.txt", "a.txt"], "sequence_length": 1 << 40, "none": None}
shapes = arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
tensors = arrays_of.arrays(st.sampled_from([np.dtype("<i8"), np.dtype("<i4")]), shapes)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def by_torch(arrays, facts):
    """What torch itself saves and loads."""
    file = io.BytesIO()
    torch.save({**{name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, **facts}, file)
    file.seek(0)
    return torch.load(file)


def assert_equal(found, wanted):
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert found[name].stride() == value.stride() or value.numel() < 2
            assert torch.equal(found[name], value)
        else:
            assert found[name] == value


@given(
    st.dictionaries(st.text(max_size=8), tensors, max_size=4), st.dictionaries(st.text(max_size=8), plain, max_size=3)
)
def test_torch_loads_what_it_would_have_saved(arrays, facts):
    loaded = torch.load(io.BytesIO(torch_bytes(arrays, facts)), weights_only=True)
    assert_equal(loaded, by_torch(arrays, facts))


def test_it_can_be_mapped_with_values_where_torch_aligns_them(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(torch_bytes(ARRAYS, FACTS))
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert_equal(loaded, by_torch(ARRAYS, FACTS))
    assert all(loaded[name].data_ptr() % 64 == 0 for name in ("input_ids", "doc_ids", "one"))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_change_of_a_loaded_tensor_changes_no_other():
    loaded = torch.load(io.BytesIO(torch_bytes({"a": ARRAYS["one"], "b": ARRAYS["one"]}, {})))
    loaded["a"].fill_(8)
    assert loaded["b"].item() == 7


def test_its_arrays_are_found():
    found = {array.name: array for array in read_arrays(".pt", torch_bytes(ARRAYS, FACTS)).arrays}
    assert {name: array.values.tolist() for name, array in found.items()} == {
        name: a.tolist() for name, a in ARRAYS.items()
    }


def test_equal_values_are_equal_bytes_whichever_objects_they_are():
    name = "document"
    same = torch_bytes({"x": ARRAYS["one"]}, {"sources": [name, name], "sequence_length": 1 << 40})
    others = [str(b"document", "ascii") for _ in range(2)]
    assert same == torch_bytes({"x": ARRAYS["one"]}, {"sources": others, "sequence_length": 1 << 40})
    assert torch.load(io.BytesIO(same))["sources"] == others


def state(**changes: object) -> dict[str, object]:
    return {"version": 1, "lake_id": "a" * 32, "next_step": 42, "slices": 8, "behind": None, **changes}


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
        (state(version=2), NewerFormatError, "of version 2, this stepfs reads 1; upgrade stepfs"),
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
    status = {"lake_id": "a" * 32, "slices": 8, "world": 16, "origins": []}
    (tmp_path / ".stepfs" / "status.json").write_text(json.dumps(status))
    for world in (None, 16):
        stream = StreamState.of_mount(tmp_path, world=world)
        assert (stream.lake_id, stream.slices, stream.next_step) == ("a" * 32, 8, 0)
    with pytest.raises(RefusedError, match=r"shows 16 ranks, the trainer has 8: .* --world 8"):
        StreamState.of_mount(tmp_path, world=8)
