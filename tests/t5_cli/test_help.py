"""`stepfs help`: the manual as it comes with the package, and its page for man."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from lakes import stepfs
from programs import commands_of

from stepfs.cli.app import app
from stepfs.cli.commands import help as manual
from stepfs_producer.cli.app import app as producing

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("topic", "begins", "has"), [
        ([], "readme\n", "  Upgrade and removal\n"),
        (["semantics"], "# Promises of a mounted lake", "28. "),
        (["mount"], "Usage: stepfs mount [OPTIONS]", "--wait-for-lake"),
        (["simulate"], "Usage: stepfs-produce simulate [OPTIONS] {PLAN}", "--steps"),
        (["Upgrade", "and"], "## Upgrade and removal", "rm -r /opt/stepfs"),
        (["repair"], "### Repair", "stepfs verify LAKE --repair"),
    ],
)  # fmt: skip
def test_a_topic_is_a_page_a_command_or_a_heading(topic, begins, has):
    done = stepfs("help", *topic)
    assert done.code == 0
    assert done.out.startswith(begins)
    assert has in done.out


def test_a_section_ends_where_the_next_one_begins():
    assert "## Commands" not in stepfs("help", "repair").out
    assert "### Repair" in stepfs("help", "groups and checkpoints").out


def test_what_has_no_topic_is_one_line():
    done = stepfs("help", "mounting", "on", "mars")
    assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)
    assert "`stepfs help` lists them" in done.err


def test_the_wheel_has_every_page():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    pages = {at: name for name, at in config["force-include"].items() if at.startswith("stepfs/pages/")}
    assert set(pages) == {f"stepfs/pages/{name}" for name in manual.PAGES.values()}
    assert all((ROOT / name).read_text() == manual._text(Path(at).name) for at, name in pages.items())


def test_the_page_for_man_has_every_option_and_no_request_but_ours():
    page = stepfs("help", "--man").out
    lines = page.splitlines()
    assert {line.split()[0] for line in lines if line[:1] in {".", "'"}} == {".TH", ".SH", ".SS", ".TP", ".PP"}
    assert not re.search(r"\\(?!\-|e|&|f[BR]|\(dq)", page), "an escape that nobody wrote"
    for program in (app, producing):
        for name, command in commands_of(program).items():
            assert any(line.startswith(".SS") and f" {name.replace('-', chr(92) + '-')} " in line for line in lines)
            for parameter in command.params:
                assert parameter.opts[0].replace("-", "\\-") in page or parameter.param_type_name == "argument"
