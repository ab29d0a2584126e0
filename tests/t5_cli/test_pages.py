"""The README as a program: its blocks run in order against real lakes, the pages name what exists, and no name
shadows a module.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import boto3
import nightly
import pytest
from finished import ran

from stepfs import errors

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPERATIONS = (ROOT / "fs/OPERATIONS.md").read_text()
PAGE = "fs/GUIDE.md"
GUIDE = (ROOT / PAGE).read_text()
PAGES = {
    "README.md": README,
    "fs/OPERATIONS.md": OPERATIONS,
}  # whose blocks run in order; those of a section of the guide below
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


@pytest.mark.nightly
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


SECOND_SCREEN = README.partition("## Your bucket, your corpus, your loop\n")[2].partition("\n## ")[0]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_bucket_a_corpus_and_a_loop_of_ones_own(reader):
    """The second screen of the README, word for word: it ends with a checkpoint in the lake and nothing on the node."""
    directory, environment = reader
    (block,) = blocks_of("README.md", SECOND_SCREEN)
    assert len(re.search(r"<<'END'\n(.*\n)END", block.text, re.DOTALL)[1].splitlines()) <= 20
    done = ran(block.command, cwd=directory, env=environment, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert str(directory) not in Path("/proc/self/mountinfo").read_text()
    mount = "stepfs mount s3://training/run node --group pretrain --steps 0:10"
    again = f"mkdir -p node; {mount}; python train.py; stepfs unmount node; stepfs status s3://training/run --json"
    status = ran(["bash", "-euc", again], cwd=directory, env=environment, timeout=300, stdin=subprocess.DEVNULL)
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["groups"]["pretrain"]["kept"] == [10], "the loop went on at its end"


def test_no_block_escapes_being_run():
    assert {block.language for block in BLOCKS} == {"sh", "python", "text", "console"}
    for page, text in PAGES.items():
        assert text.count("\n```") == 2 * len([block for block in BLOCKS if block.page == page])


@pytest.mark.parametrize(("page", "text"), [*PAGES.items(), (PAGE, GUIDE)])
def test_scripts_that_it_names_exist(page, text):
    for name in re.findall(r"`(scripts/\w+)", text):
        assert os.access(ROOT / name, os.X_OK), name


def test_exit_codes_are_those_of_the_errors():
    documented = {int(code) for code in re.findall(r"^\| (\d) \|", OPERATIONS, re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}  # type: ignore[attr-defined]
    assert documented == raised | {0}


SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", GUIDE, flags=re.MULTILINE)[1:]}
BEGINNING = "Before you begin"

# What sections that go together must print, in this order. Nightly ones start the programs of test_examples.py as the guide does.
PRINTED = {
    "Train with PyTorch, Frameworks that deal out data, Clean up": [
        "Lightning: 4 steps",
        "accelerate: 4 steps",
        "torchdata: 5 steps, then 7",
    ],
    "Train with PyTorch, Where FUSE is forbidden, Look inside, Clean up": [
        r"^step 0 loss (?s:.*)^step 7 loss",
        r"^step 8 loss \S+\nstep 9 loss",
        "text-0-of-1",
        r"readers +waited",
        "rank-00001.safetensors",
        r"input_ids +int64 +\[8, 256\]",
        '"producer": "text-0-of-1"',
        "sealed: 12 steps",
        "would delete",
        "deleted [1-9].*needs step 10",
        "is retired",
    ],
    "Train with Hugging Face": [
        "opens step-000000008/rank-00000.safetensors",
        "opens step-000000011/rank-00001.safetensors",
    ],
    "DDP, and resume after a kill": [r"step 4 loss \S+\n(?s:.*)step 11 loss", r"pretrain +8 +2 "],
    "The job came back with fewer GPUs": [
        "6 steps in .*, all committed",
        "eight/step-000000002/rank-00001.micro-0001.safetensors\nfour/step-000000002/rank-00002.micro-0000.safetensors",
        r"(?m)^(\w{64})  -\n\1  -$",
        r"step 0: 2 micro-batches of \[1, 256\]\nstep 1: 2 (?s:.*)\nstep 2: 4 (?s:.*)\nstep 5: 4",
    ],
    "WebDataset": ["step 7: 8 samples", "step 11: 8 samples"],
    "Produce from your own pipeline": [
        "step-000000009",
        r"images-1: \d+ of 320",
        "640 of 640 samples, 0 of them twice",
    ],
    "Images and captions": [
        r"  tokens +slowest ÷ mean rank 1\.\d+.*\n  pixels +slowest ÷ mean rank 1\.",
        r"\d steps in .*, all committed",
        "rank-00000.pixels.safetensors\nrank-00000.safetensors\nrank-00001.pixels",
        r"step 0 loss \d\.\d+: \d+ patches\nstep 1 (?s:.*)\nstep 2 loss",
    ],
    "Supervised fine-tuning": [
        r"talks +jsonl .*≈ \d\d\.\d%",
        r"\d steps in .*, (?s:.*)input_ids +int64",
        r"labels +int64",
        r"64 conversations, of which is learned: \['\d+<\|im_end\|>\\n', ",
    ],
    "What the model reads": [
        r"lines  record \d+ of 0/lines.txt: \d+ tokens(?s:.*?)pairs REJECTED (?s:.*?)\? \[\[many⟨eos⟩\]\]",
        r"lines +\d+ +\d+ +\d\d\.\d%\npairs ",
        r"\d steps in .*, all committed",
        r"-- rank 1, micro-batch 0, row 0: 64 tokens",
        r"{'lines': {'documents': \d",
    ],
    "A report to look at": [
        r"\d+ steps in .*, all committed",
        r"Files of 12 steps were looked at: 0, 1, 2, .*, 11\. Commits read: \d+ of \d+ versions of the log\.",
    ],
    "From a data set of Hugging Face": [
        r"answers +arrow",
        r"\d steps in .*, all committed",
        r"    It is \d+\.",
    ],
    "An author asks to be left out": [
        r"EPOCH +STEP +RANK(?s:.*)\n0 +3 +0 +0 ",
        "created lake",
        "1 of 20 records looked at are excluded",
        r"40 steps in .*\(1 excluded\)(?s:.*)no step holds it",
        "20 steps of plan made again in .*: all the same",
    ],
    "Why the GPU waited": [
        r"readers +waited \d+\.\d % of the last .* for commits",
        r"waits .*\n+act +the producers must act",
        r"slow-run +slow +\d+ +\d+ +\d.* for commits",
        r"note +mount \S+/slow-run +alive, but its readers waited (?s:.*?)→ the producers must act",
        r'stepfs_reader_wait_seconds_sum{cause="commit",for="commit"} [1-9]',
        "tracks: .*fetches.*slice 0: reader",
        r"both.json.gz: \d+ events",
    ],
    "One lake, two stores": [
        "step-000000008",
        r"created lake \w+ at file://\S+/new, a fork of file://\S+/copy, with 9 steps",
        "group :home is retired",
        r"step 7: \[\d+, 256\](?s:.*)\nstep 11: ",
    ],
    "Rollouts of asynchronous RL": ["group trainer is retired"],
    "A validation lake, with a loss of each source": [r"sealed", r"({'long': \d\.\d+, 'short': \d\.\d+})\n\1"],
    "Arrays of another model beside the batch": ["^11 True"],
    "Produce from a plan, A loss spike at step N": [
        "24 steps in .*, all committed",
        r"captions +webdataset",
        "every source is exhausted",
        r"step 12 by plan, plan [0-9a-f]{32}\nquestions: .*\nstories: ",
        r"    (Day|What is) \d+",
        r"EPOCH +STEP +RANK(?s:.*)\n0 +12 +1 +0 ",
        "4 steps of plan made again in .*: all the same",
    ],
}


def parts(sections):
    return [sections] if sections in SECTIONS else sections.split(", ")


@pytest.fixture
def follow(tmp_path):
    """Runs the blocks of a section as somebody does who follows the guide; returns what they print."""
    (tmp_path / "examples").symlink_to(ROOT / "scripts/examples")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("STEPFS_")},
        "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "STEPFS_LOG_DIR": str(tmp_path / "logs"),
    }

    started = []

    def follow(section):
        printed = []
        for block in blocks_of(PAGE, SECTIONS[section]):
            if block.language in {"text", "console"}:
                continue
            process = subprocess.Popen(
                block.command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            started.append(process)
            said, wrong = process.communicate(timeout=120)
            assert process.returncode == 0, f"{section}\n{block.text}\n{said}\n{wrong}"
            printed.append(said)
        return "".join(printed)

    yield follow
    for process in started:
        with suppress(ProcessLookupError):  # what a block that failed has left in the background
            os.killpg(process.pid, signal.SIGKILL)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        directory = line.split(" ")[4]
        if directory.startswith(f"{tmp_path}/"):
            subprocess.run(["umount", "-l", directory], check=False)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sections", PRINTED)
def test_a_section_does_what_it_says(sections, follow, tmp_path):
    nightly.needs("lightning")
    follow(BEGINNING)
    printed = "".join(follow(part) for part in parts(sections))
    at = 0
    for expected in PRINTED[sections]:
        found = re.compile(expected, re.MULTILINE).search(printed, at)
        assert found, f"{expected!r} is not printed, or not in this order:\n{printed}"
        at = found.end()
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text(), "a section unmounts what it mounts"


def test_every_section_with_commands_runs():
    with_commands = {name for name, text in SECTIONS.items() if re.search(r"^```(sh|python)$", text, re.MULTILINE)}
    assert with_commands == {BEGINNING, *(part for sections in PRINTED for part in parts(sections))}
    assert {block.language for block in blocks_of(PAGE, GUIDE)} <= {"sh", "python", "text", "console"}
    assert GUIDE.count("\n```") == 2 * len(blocks_of(PAGE, GUIDE))
    assert not re.search(r"/(home|root|tmp|mnt|work)/", GUIDE), "a path of one machine"


def test_the_guide_names_every_example():
    examples = {path.name for path in (ROOT / "scripts/examples").iterdir() if path.suffix in {".py", ".sh"}}
    named = set(re.findall(r"(?:`|examples/)(\w+\.(?:py|sh))\b", GUIDE))
    assert named == examples
