"""The README as a program: its shell and python blocks run in order, in one directory, against real lakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest

from stepfs import errors

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block and where it stands."""

    line: int
    language: str
    text: str

    @property
    def command(self) -> list[str]:
        if self.language == "python":
            return [sys.executable, "-c", self.text]
        return ["bash", "-euo", "pipefail", "-c", self.text]


BLOCKS = [
    Block(README[: match.start()].count("\n") + 1, match[1], match[2]) for match in _FENCE.finditer(README)
]


@pytest.fixture
def reader(tmp_path, seaweed):
    """The directory and environment of somebody who follows the README: some text, a bucket, our commands."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for source in (Path(sysconfig.get_path("stdlib")) / "email").glob("*.py"):
        (corpus / f"{source.stem}.txt").write_bytes(source.read_bytes())
    boto3.client("s3").create_bucket(Bucket="training")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("STEPFS_")},
        "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    yield tmp_path, environment
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        directory = line.split(" ")[4]
        if directory.startswith(f"{tmp_path}/"):
            subprocess.run(["umount", "-l", directory], check=False)


@pytest.mark.timeout(300)
def test_every_block_runs(reader):
    directory, environment = reader
    ran = 0
    for block in BLOCKS:
        if block.language in {"text", "console"}:  # what is seen, and what other tests run
            continue
        done = subprocess.run(
            block.command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"README.md:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
        ran += 1
    assert ran >= 8
    mounted = Path("/proc/self/mountinfo").read_text()
    assert str(directory) not in mounted, "the README unmounts what it mounts"


def test_no_block_escapes_being_run():
    assert {block.language for block in BLOCKS} == {"sh", "python", "text", "console"}
    assert README.count("\n```") == 2 * len(BLOCKS)


def test_the_commands_are_on_the_first_screen():
    assert README.index("stepfs mount") < 1200
    assert README[: README.index("stepfs mount")].count("\n") < 24


def test_scripts_and_files_it_names_exist():
    for name in re.findall(r"`(scripts/\w+)", README):
        assert os.access(ROOT / name, os.X_OK), name
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).is_file(), target


def test_exit_codes_are_those_of_the_errors():
    documented = {int(code) for code in re.findall(r"^\| (\d) \|", README, re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}  # type: ignore[attr-defined]
    assert documented == raised | {0}


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "sh"], ids=lambda b: str(b.line)
)
def test_no_block_depends_on_this_machine(block):
    assert not re.search(r"/(home|root|tmp|mnt|work)/", block.text)
