"""`stepfs help`: the manual as it comes with the package, and its page for man."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from lakes import stepfs

from stepfs.cli.commands import help as manual

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("topic", "begins", "has"), [
        ([], "readme\n", "  Upgrade and removal\n"),
        (["semantics"], "# Promises of a mounted lake", "28. "),
        (["mount"], "Usage: stepfs mount [OPTIONS]", "--wait-for-lake"),
        (["simulate"], "Usage: stepfs-produce simulate [OPTIONS] {PLAN}", "--limit-steps"),
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
