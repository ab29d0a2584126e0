"""The lowest version that pyproject.toml admits of each dependency, as pip's words."""

from __future__ import annotations

import re
import tomllib

from release_checks.environments import ROOT

_BOUND = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)>=(?P<version>[0-9.]+)")


def lowest_versions() -> list[str]:
    """`name==version` of every dependency; each must have a lower bound and nothing else."""
    pins = []
    for dependency in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        bound = _BOUND.fullmatch(dependency)
        if bound is None:
            raise ValueError(f"pyproject.toml: {dependency}: give it one lower bound, name>=version")
        pins.append(f"{bound['name']}=={bound['version']}")
    return pins
