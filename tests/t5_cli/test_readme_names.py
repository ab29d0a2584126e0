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
GUIDE = (ROOT / "fs/GUIDE.md").read_text()


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


def _tables(section: str) -> list[list[list[str]]]:
    """The tables of a section: per table its rows of cells, without the line below the header."""
    tables = [part.splitlines() for part in section.split("\n\n") if part.startswith("|")]
    return [[_cells(row) for row in [header, *rows]] for header, _, *rows in tables]


def test_measured_figures_stand_beside_others_with_target_and_machine():
    section = README[README.index("## Measured") : README.index("## Install")]
    [[header, *rows]] = _tables(section)
    assert all(
        any(peer in cell for cell in header) for peer in ("rclone", "JuiceFS", "boto3", "ext4", "target")
    )
    assert len(rows) >= 10
    assert all(cells[0] and cells[1] and cells[-1] for cells in rows)
    assert {len(cells) for cells in rows} == {len(header)}
    assert all(word in section for word in ("2 cores", "GHz", "Linux", "load", "scripts/bench_read"))


def test_a_training_job_is_measured_beside_every_peer():
    for header, *rows in _tables(GUIDE[GUIDE.index("## Beside what you use today") :])[:2]:
        assert {len(cells) for cells in rows} == {len(header)}
        assert all(all(cells) for cells in rows), "no row hides a figure"
        names = [cells[0] for cells in rows]
        for peer in ("reader", "MosaicML", "LitData", "s3torchconnector", "WebDataset"):
            assert any(peer in name for name in names)


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
