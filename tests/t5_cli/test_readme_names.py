"""Nothing in the README that is saved under the name shown shadows a module of Python, or reads a step twice."""

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


def test_resuming_is_shown_whole_in_few_lines():
    [block] = [text for text in README.split("```") if "StreamState" in text and text.startswith("python")]
    assert all(name in block for name in ("dcp.save", "dcp.load", "CheckpointHook"))
    assert len([line for line in block.splitlines()[1:] if line.strip() and "import" not in line]) <= 20


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.removeprefix("|").removesuffix("|").split("|")]


def test_measured_figures_stand_beside_others_with_target_and_machine():
    section = README[README.index("## Measured") : README.index("## Install")]
    tables = [part.splitlines() for part in section.split("\n\n") if part.startswith("|")]
    (header, _, *rows), (training, _, *training_rows) = tables
    for peer in ("rclone", "JuiceFS", "boto3", "ext4", "target"):
        assert peer in header
    for peer in ("stepfs.Lake", "MosaicML", "LitData", "s3torchconnector", "WebDataset"):
        assert peer in training
    assert len(rows) >= 10
    assert len(training_rows) >= 5
    assert all(cells[0] and cells[1] and cells[-1] for cells in map(_cells, rows))
    assert all(all(cells) for cells in map(_cells, training_rows)), "no row hides a peer"
    for first, others in ((header, rows), (training, training_rows)):
        assert {len(_cells(row)) for row in others} == {len(_cells(first))}
    assert all(word in section for word in ("2 cores", "GHz", "Linux", "load", "scripts/bench_read"))


def test_how_a_group_ends_is_said_where_groups_are():
    assert "--retire" in OPERATIONS[OPERATIONS.index("* `--group` names the run") :][:400]
    assert "--retire" in README[README.index("`--group` names the run") :][:400]


def test_what_it_is_for_is_said_in_the_words_of_its_users():
    for words in (
        "Mount on GPU nodes",
        "Unmodified file-based dataloaders",
        "`ls` to inspect step progress",
        "Checkpoint-triggered unmount cleanup",
    ):
        assert words in README
