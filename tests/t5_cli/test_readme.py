"""The README as a program: its blocks run in order against real lakes, the pages name what exists, and no name
shadows a module.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
from finished import ran

from stepfs import errors
from stepfs_producer import Producer

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "fs/OPERATIONS.md").read_text()
PAGES = {"README.md": README, "fs/OPERATIONS.md": OPERATIONS}  # test_guide.py runs fs/GUIDE.md
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block and where it stands."""

    page: str
    line: int
    language: str
    text: str

    @property
    def command(self) -> list[str]:
        if self.language == "python":
            return ["python", "-c", self.text]
        return ["bash", "-euo", "pipefail", "-c", self.text]


def blocks_of(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]) for match in _FENCE.finditer(text)]


BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]


@pytest.fixture
def reader(tmp_path, seaweed):
    """The directory and environment of somebody who follows the README: some text, a bucket, our commands."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for source in (Path(sysconfig.get_path("stdlib")) / "email").glob("*.py"):
        (corpus / f"{source.stem}.txt").write_bytes(source.read_bytes())
    bucket = boto3.resource("s3").Bucket("training")
    bucket.create()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("STEPFS_")},
        "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    yield tmp_path, environment
    bucket.objects.delete()
    bucket.delete()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        directory = line.split(" ")[4]
        if directory.startswith(f"{tmp_path}/"):
            subprocess.run(["umount", "-l", directory], check=False)


@pytest.mark.timeout(900)
def test_every_block_runs(reader):
    directory, environment = reader
    count = 0
    for block in BLOCKS:
        if block.language in {"text", "console"}:  # what is seen, and what other tests run
            continue
        done = ran(block.command, cwd=directory, env=environment, timeout=300, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{block.page}:{block.line}\n{block.text}\n{done.stdout}\n{done.stderr}"
        count += 1
    assert count >= 8
    mounted = Path("/proc/self/mountinfo").read_text()
    assert str(directory) not in mounted, "the pages unmount what they mount"


def test_no_block_escapes_being_run():
    assert {block.language for block in BLOCKS} == {"sh", "python", "text", "console"}
    for page, text in PAGES.items():
        assert text.count("\n```") == 2 * len([block for block in BLOCKS if block.page == page])


def test_the_commands_are_on_the_first_screen():
    assert README.index("stepfs mount") < 1200
    assert README[: README.index("stepfs mount")].count("\n") < 24


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_scripts_and_files_it_names_exist(page):
    for name in re.findall(r"`(scripts/\w+)", PAGES[page]):
        assert os.access(ROOT / name, os.X_OK), name
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / file if file else ROOT / page
        assert linked.is_file(), target
        assert not anchor or anchor in headings(linked), target


def test_exit_codes_are_those_of_the_errors():
    documented = {int(code) for code in re.findall(r"^\| (\d) \|", OPERATIONS, re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}  # type: ignore[attr-defined]
    assert documented == raised | {0}


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "sh"], ids=lambda b: f"{b.page}:{b.line}"
)
def test_no_block_depends_on_this_machine(block):
    assert not re.search(r"/(home|root|tmp|mnt|work)/", block.text)


def test_no_lake_is_called_like_a_standard_module():
    names = set(re.findall(r"(?:\$PWD|\{os\.getcwd\(\)\})/([a-z_]+)", README))
    assert "lake" in names
    assert not names & sys.stdlib_module_names


def test_what_holds_back_a_producer_is_named():
    produce = OPERATIONS[OPERATIONS.index("## Producers") : OPERATIONS.index("## Mounts")]
    options = set(inspect.signature(Producer.__init__).parameters) - {"self", "lake_url", "endpoint_url"}
    assert {name for name in options if not re.search(rf"`{name}\b|{name}=", produce)} == {
        "store",
        "clock",
        "pacer",
    }, "for tests and simulations"
