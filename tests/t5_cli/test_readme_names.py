"""Nothing in the README that is saved under the name shown shadows a module of Python, or reads a step twice."""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_no_lake_is_called_like_a_standard_module():
    names = set(re.findall(r"(?:\$PWD|\{os\.getcwd\(\)\})/([a-z_]+)", README))
    assert "lake" in names
    assert not names & sys.stdlib_module_names


def test_globs_name_steps():
    patterns = set(re.findall(r"glob\(\"([^\"]+)\"\)", README))
    assert patterns == {"run/*/rank-*"}, "shown as what reads the newest step twice"
    assert "`step-*`" in README


def test_how_a_group_ends_is_said_where_groups_are():
    section = README[README.index("* `--group` names the run") :]
    assert "--retire" in section[:400]
