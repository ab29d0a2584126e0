"""Shell completion: commands and options of both programs."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from programs import ran


def completing(program: str, **variables: str) -> str:
    env = {"PATH": os.environ["PATH"], **variables}
    path = Path(sysconfig.get_path("scripts")) / program
    done = ran([path], env=env, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("stepfs mount --cache-", ["--cache-dir", "--cache-size"]),
        ("stepfs-produce ch", ["check"]),
        ("stepfs-produce check --no-s", ["--no-sources"]),
    ],
)
def test_words_are_completed(words, expected):
    program, *more = words.split()
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    shown = completing(
        program, **{variable: "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(more))}
    )
    assert shown.split() == expected


def test_a_shell_is_given_something_to_source():
    assert "_STEPFS_COMPLETE=complete_" in completing("stepfs", _STEPFS_COMPLETE="source_bash")
