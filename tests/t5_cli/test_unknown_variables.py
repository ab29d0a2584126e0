"""A misspelt STEPFS_… variable is named by every command, once, on stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lakes import stepfs
from programs import commands_of
from typer.testing import CliRunner

from stepfs.cli import variables
from stepfs.cli.app import app
from stepfs_producer.cli.app import app as produce

TREE = Path(__file__).parents[2]


def test_the_list_is_what_is_read():
    read = set()
    for each in (app, produce):
        read |= {p.envvar for sub in commands_of(each).values() for p in sub.params if p.envvar}
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        for file in (TREE / package).rglob("*.py"):
            read |= set(re.findall(r"environ(?:\.get\(|\[)\"(STEPFS_\w+)\"", file.read_text()))
    unit = (TREE / "scripts/deploy/stepfs@.service").read_text()
    read |= set(re.findall(r"\$\{(STEPFS_\w+)\}", unit))
    assert read - {"STEPFS_SSE", "STEPFS_SSE_KMS_KEY_ID"} == variables.KNOWN - {
        "STEPFS_SSE",
        "STEPFS_SSE_KMS_KEY_ID",
    }


@pytest.mark.parametrize(
    ("name", "near"), [
        ("STEPFS_MEMORYSIZE", "STEPFS_MEMORY_SIZE"), ("STEPFS_GRUOP", "STEPFS_GROUP"),
        ("STEPFS_CACHE_DIRECTORY", "STEPFS_CACHE_DIR"), ("STEPFS_XYZZY_PLUGH_QUUX", None),
    ],
)  # fmt: skip
def test_the_nearest_name_is_offered(name, near):
    (line,) = variables.unknown([name, "STEPFS_GROUP", "PATH", "MY_STEPFS_X"])
    assert line.startswith(f"{name} is set and means nothing")
    assert line.endswith(f"do you mean {near}?") if near else line.endswith("nothing")


def test_what_kubernetes_sets_for_a_service_is_not_meant():
    names = ["STEPFS_SERVICE_HOST", "STEPFS_SERVICE_PORT", "STEPFS_SERVICE_PORT_HTTP", "STEPFS_PORT"]
    names += ["STEPFS_PORT_9464_TCP", "STEPFS_PORT_9464_TCP_ADDR", "STEPFS_READER_SERVICE_HOST"]
    assert list(variables.unknown(names)) == []


def test_every_command_says_it_once_and_prints_the_same(file_url):
    assert stepfs("init", file_url, "--slices", 1).err == ""
    for command in (["ls", file_url, "--json"], ["status", file_url, "--json"], ["verify", file_url]):
        plain = stepfs(*command)
        warned = stepfs(*command, env={"STEPFS_GRUOP": "secret\x1b[31m"})
        assert (warned.code, warned.out) == (plain.code, plain.out)
        assert warned.err == "stepfs: STEPFS_GRUOP is set and means nothing; do you mean STEPFS_GROUP?\n"
    json.loads(stepfs("ls", file_url, "--json", env={"STEPFS_GRUOP": "x"}).out)
    done = CliRunner().invoke(produce, ["text", "--help"], env={"STEPFS_SLICE": "2"})
    assert done.stderr.count("do you mean STEPFS_SLICES?") == 1


def test_completion_says_nothing():
    done = CliRunner().invoke(
        app,
        [],
        prog_name="stepfs",
        env={
            "_STEPFS_COMPLETE": "complete_bash",
            "COMP_WORDS": "stepfs s",
            "COMP_CWORD": "1",
            "STEPFS_GRUOP": "x",
        },
    )
    assert done.stdout.split() == ["show", "status", "seal"]
    assert done.stderr == ""
