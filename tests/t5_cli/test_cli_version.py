"""`stepfs version`: what runs here, and which extras are missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tomllib
from pathlib import Path

import json_schemas
import pytest
from lakes import stepfs

from stepfs.doctor import versions

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def names(lines: list[str]) -> set[str]:
    found = {re.match(r"[\w.-]+", line)[0] for line in lines if not line.startswith("stepfs[")}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


REQUIRED = names(PROJECT["dependencies"])
EXTRAS = {extra: names(lines) for extra, lines in PROJECT["optional-dependencies"].items()}


def without(monkeypatch, *packages):
    real = importlib.metadata.version

    def version(name):
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_every_declared_library_is_there_with_its_version():
    document = stepfs("version", "--json").document
    json_schemas.check("version", document)
    declared = REQUIRED.union(*EXTRAS.values())
    found = document["libraries"]
    assert found.pop("ray") is None  # in an environment of its own (scripts/setup)
    assert found == {name: importlib.metadata.version(name) for name in declared - {"ray"}}
    assert document["stepfs"] == importlib.metadata.version("stepfs")
    assert (document["python"], document["executable"]) == (platform.python_version(), sys.executable)
    assert document["kernel"] == os.uname().release


def test_libfuse_is_the_one_that_pyfuse3_loads():
    document = stepfs("version", "--json").document
    assert re.fullmatch(r"3\.\d+\.\d+\S*", document["libfuse"])
    mapped = re.findall(r"libfuse3[^/]*\.so\.(\S+)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert mapped
    assert document["libfuse"].startswith("3.")
    if shutil.which("fusermount3"):
        assert re.fullmatch(r"3(\.\d+)+", document["fusermount3"])


@pytest.mark.parametrize(
    ("package", "remedy"), [
        ("torch", "stepfs[torch]"), ("tokenizers", "stepfs[text]"), ("pyyaml", "stepfs[plan]"),
        ("pyarrow", "stepfs[parquet]"), ("zstandard", "stepfs[zstd]"), ("trio", "stepfs"),
    ],
)  # fmt: skip
def test_a_library_that_is_missing_is_named_with_the_least_that_brings_it(monkeypatch, package, remedy):
    without(monkeypatch, package)
    (line,) = [line for line in stepfs("version").out.splitlines() if line.split()[0] == package]
    assert line.endswith(f"not installed: pip install '{remedy}'")
    assert stepfs("version", "--json").document["libraries"][package] is None


def test_a_machine_without_fuse_still_gets_its_versions(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    ended = stepfs("version")
    assert (ended.code, ended.err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in ended.out.splitlines())
    assert lines["stepfs"] == PROJECT.get("version", importlib.metadata.version("stepfs"))
    assert lines["libfuse"].startswith("not found")
    assert lines["fusermount3"].startswith("not found")
    document = stepfs("version", "--json").document
    json_schemas.check("version", document)
    assert (document["libfuse"], document["fusermount3"]) == (None, None)


@pytest.mark.parametrize("answer", ["exit 1", "echo nothing of use", "exec /nonexistent", "kill -9 $$"])
def test_a_helper_that_does_not_say_its_version_fails_nothing(monkeypatch, tmp_path, answer):
    helper = tmp_path / "fusermount3"
    helper.write_text(f"#!/bin/sh\n{answer}\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert versions.fusermount3() is None


def test_a_source_tree_on_the_path_has_no_list_of_libraries(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    ended = stepfs("version", "--json")
    assert (ended.code, ended.document["libraries"]) == (0, {})
