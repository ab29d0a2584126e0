"""`.pt` files of planned steps: torch reads tensors and facts back, and equal values are equal bytes."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from stepfs.payload import read_arrays
from stepfs.torch import torch_bytes

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


def test_another_process_makes_the_same_bytes():
    program = (
        "import hashlib, numpy as np\n"
        "from stepfs.torch import torch_bytes\n"
        "print(hashlib.sha256(torch_bytes({'x': np.arange(9)}, {'s': ['a', 'b']})).hexdigest())"
    )
    [there] = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout.split()
    here = hashlib.sha256(torch_bytes({"x": np.arange(9)}, {"s": ["a", "b"]})).hexdigest()
    assert there.decode() == here
