"""The public faces of both packages: every name comes with one import, only when it is asked for, and is in the
reference.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
from test_import_cost import HEAVY, all_modules_after, modules_after

import stepfs
import stepfs_producer
from api_page import page

FACES = [stepfs, stepfs_producer]


@pytest.mark.parametrize("face", ["stepfs", "stepfs_producer"])
def test_a_face_alone_loads_next_to_nothing(face):
    loaded = all_modules_after(f"import {face}")
    assert not {name.partition(".")[0] for name in loaded} & (HEAVY | {"trio", "msgpack", "pydantic"})
    ours = {name for name in loaded if name.partition(".")[0] in {"stepfs", "stepfs_producer"}}
    assert len(ours) <= 4, ours


@pytest.mark.parametrize(
    "names",
    [
        "stepfs.CheckpointHook, stepfs.StreamState, stepfs.ShuffledSteps",
        "stepfs.Lake, stepfs.StepDataset",
        "stepfs.torch.dump",
    ],
)
def test_a_public_name_of_readers_loads_neither_torch_nor_numpy(names):
    assert not modules_after(f"import stepfs\n{names}") & HEAVY


def test_a_producer_loads_no_plan():
    assert "pydantic" not in modules_after("import stepfs_producer\nstepfs_producer.Producer")


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_is_there_once_under_its_name(face):
    for name in face.__all__:
        assert getattr(face, name) is getattr(face, name)
        assert name in dir(face)
    assert sorted(face.__all__, key=str.lower) == sorted(set(face.__all__), key=str.lower)


@pytest.mark.parametrize("face", FACES)
def test_type_checkers_see_the_names_that_there_are(face):
    """They read the imports under TYPE_CHECKING; programs get what `__all__` lists."""
    tree = ast.parse(Path(face.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seen) <= set(face.__all__)
    for name, home in seen.items():
        assert getattr(face, name) is getattr(import_module(home), name), name
    eager = {"__version__", "Fenced", "Sealed"}
    assert set(face.__all__) - set(seen) <= eager


@pytest.mark.parametrize("face", FACES)
def test_an_unknown_name_is_an_attribute_error_and_an_import_error(face):
    with pytest.raises(AttributeError, match=f"module '{face.__name__}' has no attribute 'Lakes'"):
        face.Lakes  # noqa: B018
    with pytest.raises(ImportError, match="Lakes"):
        exec(f"from {face.__name__} import Lakes", {})


def test_the_page_names_every_public_name():
    made = page()
    for package in (stepfs, stepfs_producer):
        for name in package.__all__:
            assert re.search(rf"\b{name}\b", made), name
