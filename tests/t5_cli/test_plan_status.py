"""What a lake says of the plan that fills it: `stepfs status`, and the page of JSON documents."""

from __future__ import annotations

import json

import json_schemas
import pytest
from lakes import SLICES, commit, produce, stepfs

PLAN = f"""\
output: {{ext: .npy, mesh: "dp={SLICES}", sequence_length: 64}}
sources:
  code: {{format: jsonl, files: code.jsonl, on_error: {{do: skip}}}}
  prose: {{format: text, files: prose.txt}}
mix: {{code: 25, prose: 75}}
"""


@pytest.fixture
def summary(tmp_path, file_url):
    """Of a run of 8 steps into a lake that another producer uses, too."""
    lines = [json.dumps({"text": f"code {n} " + "x" * (n % 40)}) for n in range(99)]
    for place in range(5, 99, 12):
        lines[place] = "{"
    (tmp_path / "code.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prose.txt").write_text(
        "".join(f"prose {n} " + "y" * (n * 31 % 120) + "\n" for n in range(99))
    )
    (tmp_path / "plan.yaml").write_text(PLAN)
    stepfs("init", file_url, "--slices", SLICES, "--ext", ".npy")
    commit(file_url, range(3))
    plan = tmp_path / "plan.yaml"
    done = produce("run", plan, file_url, "--workers", 1, "--limit-steps", 8, "--json")
    assert done.code == 0, done.err
    return done.document


def test_what_a_run_prints_and_a_status_says_of_it_is_as_their_schemas_say(summary, file_url) -> None:
    assert summary["bad_records"], "else their fields are not compared"
    json_schemas.check("produce-run", summary)
    json_schemas.check("status-lake", stepfs("status", file_url, "--json").document)


def test_the_status_of_a_lake_agrees_with_the_run_that_filled_it(summary, file_url) -> None:
    producers = stepfs("status", file_url, "--json").document["producers"]
    plan = producers.pop("plan")["plan"]
    assert [known["plan"] for known in producers.values()] == [None] * len(producers) != []
    assert (plan["digest"], plan["step"], plan["tokens"]) == (summary["plan"], 8, summary["total"]["tokens"])
    same = ("tokens", "share", "records", "skipped", "epoch")
    assert plan["sources"] == {
        name: {field: source[field] for field in same} for name, source in summary["sources"].items()
    }
    assert plan["sources"]["code"]["skipped"]
    shown = [line.split() for line in stepfs("status", file_url).out.splitlines()]
    prose = plan["sources"]["prose"]
    assert ["plan", "prose", str(prose["tokens"]), f"{prose['share']:.2%}"] in [row[:4] for row in shown]
