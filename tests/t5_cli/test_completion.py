"""Shell completion: commands and options, quickly and without the libraries that do the work."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

STEPFS = Path(sysconfig.get_path("scripts")) / "stepfs"


def complete(words: str, position: int) -> list[str]:
    env = {
        "PATH": os.environ["PATH"],
        "_STEPFS_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(position),
    }
    done = subprocess.run([STEPFS], env=env, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "position", "expected"),
    [
        ("stepfs mo", 1, ["mount"]),
        ("stepfs un", 1, ["unmount"]),
        ("stepfs mount --cache-", 2, ["--cache-dir", "--cache-size"]),
        ("stepfs doctor --b", 2, ["--bundle"]),
    ],
)
def test_words_are_completed(words, position, expected):
    assert complete(words, position) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_something_to_source(shell):
    env = {"PATH": os.environ["PATH"], "_STEPFS_COMPLETE": f"source_{shell}"}
    done = subprocess.run([STEPFS], env=env, capture_output=True, text=True, timeout=100, check=True)
    assert "_STEPFS_COMPLETE=complete_" in done.stdout
