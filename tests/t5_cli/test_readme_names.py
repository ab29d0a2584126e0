"""Nothing in the README that is saved under the name shown shadows a module of Python, or reads a step twice; every bound
of a producer has its row."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from stepfs_producer import Producer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "fs/OPERATIONS.md").read_text()


def test_no_lake_is_called_like_a_standard_module():
    names = set(re.findall(r"(?:\$PWD|\{os\.getcwd\(\)\})/([a-z_]+)", README))
    assert "lake" in names
    assert not names & sys.stdlib_module_names


def test_globs_name_steps():
    patterns = set(re.findall(r"glob\(\"([^\"]+/rank-[^\"]+)\"\)", README))
    others = {pattern for pattern in patterns if "/step-*/" not in pattern}
    assert others == {"run/*/rank-*"}, "shown as what reads the newest step twice"
    assert "`step-*`" in README


def test_what_holds_back_a_producer_is_named():
    produce = OPERATIONS[OPERATIONS.index("## Producers") : OPERATIONS.index("## Mounts")]
    options = set(inspect.signature(Producer.__init__).parameters) - {"self", "lake_url", "endpoint_url"}
    assert {name for name in options if not re.search(rf"`{name}\b|{name}=", produce)} == {
        "store",
        "clock",
        "pacer",
    }, "for tests and simulations"
