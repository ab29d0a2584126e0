"""scripts/setup with a Python that only notes what it is asked for, and the quickstart as CI sees it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tools
from realmount import until

PYTHON = """\
#!/usr/bin/env bash
case "$*" in
    "-m venv --clear .venv") mkdir -p .venv/bin; echo "$PWD/.venv" >.venv/bin/activate
        cp "$0" .venv/bin/python; cp "$0" .venv/bin/stepfs ;;
    *"venv --clear --without-pip .venv/ray") mkdir -p .venv/ray/lib/python3/site-packages ;;
    "-m pip "*) echo "$*" >>calls; until [ -e open ]; do sleep 0.01; done ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    for name in ("scripts/setup", "tests/support/azurite", "pyproject.toml", "constraints.lock.txt"):
        copy = shutil.copytree if (tools.ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(tools.ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, text in (("python", PYTHON), ("npm", "#!/bin/sh\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    yield tmp_path
    (tmp_path / "open").touch()  # nothing waits for a test that failed


def setup(checkout: Path, output: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "PYTHON": str(checkout / "bin/python")}
    with output.open("wb") as said:
        return subprocess.Popen(
            [checkout / "scripts/setup"], env={**os.environ, **environment}, stdout=said, stderr=said
        )


def test_a_second_one_waits_for_the_first_and_finds_nothing_to_do(checkout: Path) -> None:
    calls, outputs = checkout / "calls", [checkout / "first", checkout / "second"]
    first = setup(checkout, outputs[0])
    until(calls.exists, outputs[0].read_text, within_s=20)
    second = setup(checkout, outputs[1])
    until(lambda: "\n" in outputs[1].read_text(), "the second one is silent", within_s=20)
    (checkout / "open").touch()
    assert (first.wait(60), second.wait(60)) == (0, 0), outputs[0].read_text()
    assert outputs[1].read_text() == "setup: waiting for another one in this checkout\n"
    asked = calls.read_text().splitlines()
    assert len(asked) == len(set(asked)) == 5
    # A package whose source asks for another builder than .venv has: Python 3.11 brings setuptools 65, and pyfuse3 wants 78.
    assert ["pyfuse3" in call for call in asked if "--no-build-isolation" not in call].count(True) == 1


def test_an_environment_that_is_a_link_is_left_as_it_is(checkout: Path) -> None:
    """It emptied another checkout's, which programs were running from."""
    other = checkout / "other checkout's"
    (other / "bin").mkdir(parents=True)
    (other / "bin/python").touch()
    (checkout / ".venv").symlink_to(other)
    assert setup(checkout, checkout / "said").wait(60) == 1
    assert f"what it names: {other}; remove the link" in (checkout / "said").read_text()
    assert (other / "bin/python").exists()


SOURCES, DOCUMENTS = "every source byte", "every document is there"


# What commands tell beside progress: replicate until its first copy is there, and a run over a corpus that grew.
USUAL = r"stepfs: new group '|stepfs: .* is no lake yet; waiting|stepfs-produce: the changed plan makes the steps from \d+ on$"


@pytest.mark.nightly
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--brief"], SOURCES), (["--plan", "--brief"], DOCUMENTS), ([], SOURCES), (["--plan"], DOCUMENTS),
        *((["--store", kind], SOURCES) for kind in ("s3", "gs", "az")), (["--replica", "--brief"], DOCUMENTS),
    ],
)  # fmt: skip
def test_the_quickstart_holds_what_its_table_says(options, said):
    done = tools.ran("quickstart", *options, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
    assert [line for line in done.stderr.splitlines() if not re.match(USUAL, line)] == []
