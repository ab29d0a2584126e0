"""fs/JSON.md names every field of every document, and each document says its schema."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from lakes import SLICES, commit, stepfs

from stepfs.data.counters import DataCounts
from stepfs.data.facts import DataFacts
from stepfs.format.ids import JSON_SCHEMA
from stepfs.mount import documents
from stepfs.mount.status.reports import Reports

TREE = Path(__file__).parents[2]
PAGE = (TREE / "fs/JSON.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
NAMES_OF_OTHERS = {"producers", "groups", "sources", "libraries"}  # maps whose keys are not ours


def fields(document) -> set[str]:
    if isinstance(document, list):
        return set().union(*map(fields, document)) if document else set()
    if not isinstance(document, dict):
        return set()
    found = set(document)
    for name, value in document.items():
        values = list(value.values()) if name in NAMES_OF_OTHERS and isinstance(value, dict) else value
        found |= fields(values)
    return found


def named(section: str) -> set[str]:
    return set(re.findall(r"`([a-z_0-9]+)`", SECTIONS[section])) | {"schema"}


@pytest.fixture
def lake(file_url):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(5))
    assert stepfs("checkpoint", file_url, "--group", "run", 1).code == 0
    return file_url


@pytest.mark.parametrize(
    ("section", "command"),
    [
        ("stepfs ls", ["ls"]),
        ("stepfs ls", ["ls", "--step", 3]),
        ("stepfs status LAKE", ["status"]),
        ("stepfs verify", ["verify"]),
        ("stepfs checkpoint", ["checkpoint", "--group", "run", "2"]),
        ("stepfs reclaim", ["reclaim", "--dry-run"]),
    ],
)
def test_the_page_names_what_a_command_prints(lake, section, command):
    document = stepfs(command[0], lake, *command[1:], "--json").document
    assert document["schema"] == JSON_SCHEMA
    assert fields(document) <= named(section)


def test_the_page_names_what_retiring_prints(lake):
    document = stepfs("retire-producer", lake, "tok-0", "--json").document
    assert document["schema"] == JSON_SCHEMA
    assert fields(document) <= named("stepfs retire-producer")


def test_the_page_names_what_version_prints():
    document = stepfs("version", "--json").document
    assert document["schema"] == JSON_SCHEMA
    assert fields(document) == named("stepfs version")


def test_the_page_names_what_a_mount_says():
    written = inspect.getsource(Reports.status) + inspect.getsource(DataFacts.budgets)
    keys = set(re.findall(r'^ +"([a-z_]+)":', written, re.MULTILINE))
    assert "frontier" in keys
    assert keys <= named(".stepfs/status.json, stepfs status DIR")
    config = set(re.findall(r'^ +"([a-z_]+)":', inspect.getsource(Reports.config), re.MULTILINE))
    assert config <= named(".stepfs/config.json")
    step = set(re.findall(r'^ +"([a-z_0-9]+)":', inspect.getsource(documents.describe_step), re.MULTILINE))
    assert step <= named(".stepfs/steps/N.json")
    counters = {field.name for field in dataclasses.fields(DataCounts)} & set(DataCounts().as_dict())
    assert counters <= named(".stepfs/status.json, stepfs status DIR")


def test_the_readme_leads_to_the_page():
    assert "(fs/JSON.md)" in (TREE / "README.md").read_text()
