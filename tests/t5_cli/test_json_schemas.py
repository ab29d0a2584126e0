"""fs/schemas: one JSON Schema per document, which describes its fields, held against what the commands print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import json_schemas
import pytest
from jsonschema import Draft202012Validator
from lakes import SLICES, commit, stepfs

PAGE = json_schemas.FOLDER.with_name("JSON.md").read_text()
LINK = re.compile(r"\[schemas/([a-z-]+)\.json\]\(schemas/\1\.json\)")


@pytest.fixture
def lake(file_url: str) -> str:
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(5))
    assert stepfs("checkpoint", file_url, "--group", "run", "--new-group", 1).code == 0
    return file_url


def test_the_page_names_each_schema_once():
    assert sorted(LINK.findall(PAGE)) == json_schemas.NAMES


@pytest.mark.parametrize("name", json_schemas.NAMES)
def test_a_schema_is_one_has_the_number_and_describes_every_field(name):
    schema = json_schemas.schema(name)
    Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"] == {"const": 1}
    assert "schema" in schema["required"]
    assert json_schemas.undescribed(name) == {"schema"}


@pytest.mark.parametrize(
    ("name", "command"), [
        ("ls", ["ls"]), ("ls", ["ls", "--step", 3]), ("status-lake", ["status"]), ("verify", ["verify"]),
        ("checkpoint", ["checkpoint", "--group", "run", "2"]), ("retire-group", ["retire-group", "run"]),
        ("seal", ["seal"]), ("reclaim", ["reclaim", "--dry-run"]),
        ("reclaim", ["reclaim"]), ("doctor", ["doctor"]),
    ],
)  # fmt: skip
def test_a_command_prints_what_its_schema_says(lake, name, command):
    ended = stepfs(command[0], lake, *command[1:], "--json")
    assert ended.code == 0 or name == "doctor", ended.err
    json_schemas.check(name, ended.document)


def test_an_empty_lake_is_described_by_the_same_schemas(file_url):
    stepfs("init", file_url, "--slices", 1)
    for name in ("ls", "verify"):
        json_schemas.check(name, stepfs(name, file_url, "--json").document)
    json_schemas.check("status-lake", stepfs("status", file_url, "--json").document)


@pytest.mark.parametrize("command", [["status"], ["ls", "--step", 77], ["verify"], ["checkpoint", "--group", "g", 2]])
def test_an_error_is_a_document_too(lake, file_url, command):
    for where in (lake, f"{file_url}-none"):
        ended = stepfs(command[0], where, *command[1:], "--json")
        if ended.code == 0:
            continue
        json_schemas.check("error", ended.document)
        assert ended.document["exit_code"] == ended.code
        assert ended.err == f"stepfs: {ended.document['error']}\n"


@pytest.mark.parametrize("arguments", [["ls"], ["status", "x", "--nothing"], ["ls", "file:///x", "--step", "y"]])
def test_a_wrong_call_is_a_document_too(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "stepfs", *arguments, "--json"], check=False, capture_output=True, text=True
    )
    document = json.loads(done.stdout)
    json_schemas.check("error", document)
    assert (done.returncode, document["exit_code"], done.stderr) == (2, 2, f"stepfs: {document['error']}\n")


def test_retiring_and_forking_and_damage_are_described(lake, tmp_path):
    retired = stepfs("retire-producer", lake, "tok-0", "--json").document
    json_schemas.check("retire-producer", retired)
    fork = f"file://{tmp_path / 'fork'}"
    forked = stepfs("fork", lake, fork, "--skip", "3:", "--json").document
    json_schemas.check("fork", forked)
    assert (forked["lake"], forked["parent"], forked["step"], forked["steps"]) == (fork, lake, 3, 3)
    assert forked["lake_id"] == stepfs("ls", fork, "--json").document["lake_id"]
    assert forked["left_out"] is None

    [newest] = sorted(Path(lake.removeprefix("file://")).glob("*/log/*"))[-2:-1]
    newest.write_bytes(b"rot")
    broken = stepfs("verify", lake, "--json")
    assert broken.code == 5
    json_schemas.check("verify", broken.document)
    around = stepfs("fork", lake, f"{fork}-2", "--until-damage", "--json").document
    json_schemas.check("fork", around)
    assert around["left_out"]["version"] == int(newest.name)


def test_the_check_refuses_a_field_that_nobody_wrote_down_and_one_that_is_gone(lake):
    document = stepfs("ls", lake, "--json").document
    with pytest.raises(AssertionError, match="unheard_of"):
        json_schemas.check("ls", {**document, "unheard_of": 1})
    with pytest.raises(AssertionError, match="unheard_of"):
        json_schemas.check("ls", {**document, "steps": [{**document["steps"][0], "unheard_of": 1}]})
    with pytest.raises(AssertionError, match="'ext' is a required property"):
        json_schemas.check("ls", {name: value for name, value in document.items() if name != "ext"})
    assert Draft202012Validator(json_schemas.schema("ls")).is_valid({**document, "unheard_of": 1})
