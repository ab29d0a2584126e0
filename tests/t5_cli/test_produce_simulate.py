"""`stepfs-produce simulate`: says of the first steps what a run of the same steps says, and touches nothing."""

from __future__ import annotations

import re
import sys
from functools import partial

import json_schemas
import pytest
from lakes import produce
from plans import PLAN, run

from stepfs._internal.limits import Memory
from stepfs_producer.run import memory

MEASURES = (
    "fill", "slowest_to_mean", "slowest_to_mean_micro", "padding_tokens", "cut_documents", "lost_tokens", "sources",
)  # fmt: skip

simulate = partial(produce, "simulate")
check = partial(produce, "check")


def test_what_it_says_is_what_a_run_says(plan, file_url):
    before = sorted(plan.parent.rglob("*"))
    done = simulate(plan, "--limit-steps", 9, "--workers", 2, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(plan.parent.rglob("*")) == before
    simulated = done.document
    assert simulated["steps"] == 9
    ran = run(plan, file_url, "--limit-steps", 9, "--json").document
    assert {name: simulated[name] for name in MEASURES} == {name: ran[name] for name in MEASURES}
    assert simulated["plan"] == ran["plan"]
    assert simulated["tokens"] == ran["run"]["tokens"]
    json_schemas.check("produce-simulate", simulated)


def test_it_ends_where_the_plan_does_and_shows_a_page(plan):
    plan.write_text(PLAN + "defaults: {epochs: 1, on_error: {do: skip}}\nuntil: {exhausted: first}\n")
    code = plan.parent / "code/0.jsonl"
    code.write_text(code.read_text() + "no json\n")
    done = simulate(plan, "--limit-steps", 10_000, "--workers", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^steps      \d+ in .* exhausted", done.stdout)
    for name in ("code", "prose"):
        assert re.search(rf"^{name} +\d+\.\d{{3}}% +\d+\.\d{{3}}% ", done.stdout, re.MULTILINE)
    assert re.search(r"^skipped: source code, .*0\.jsonl at \d+: ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (("code: 30", "cod: 30"), 2, ":6:7: mix: unknown source 'cod'; did you mean 'code'?"),
        (("prose.txt", "gone.txt"), 3, "gone.txt: no such file or directory"),
    ],
)
def test_a_plan_that_is_wrong_is_refused_as_check_does(plan, change, code, said):
    plan.write_text(PLAN.replace(*change))
    done = simulate(plan, "--workers", 1)
    assert done.returncode == code
    assert said in done.stderr


def test_a_bad_record_that_may_not_be_skipped_ends_it(plan):
    (plan.parent / "code/0.jsonl").write_text("no json\n" * 100)
    (plan.parent / "code/1.jsonl").write_text("no json\n" * 100)
    done = simulate(plan, "--workers", 1)
    assert done.returncode != 0
    assert "source code" in done.stderr


def test_functions_of_the_user_may_stand_beside_the_plan(plan, monkeypatch):
    monkeypatch.setattr("sys.path", list(sys.path))
    (plan.parent / "my_functions_beside_the_plan.py").write_text(
        "def render(record):\n    return record['text'][:5]\n\ndef flops(columns):\n    return columns['tokens'] ** 2\n"
    )
    mine = "my_functions_beside_the_plan"
    plan.write_text(
        PLAN.replace("files: code/", f"files: code/, transform: '{mine}:render'") + f"cost: {{call: '{mine}:flops'}}\n"
    )
    done = simulate(plan, "--limit-steps", 3, "--workers", 1, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    code = done.document["sources"]["code"]
    assert code["tokens"] == pytest.approx(6 * code["records"], abs=6), "five bytes and the end of each document"
    assert check(plan).returncode == 0


def test_a_simulation_needs_no_memory_for_steps_that_it_does_not_make(plan, file_url, monkeypatch) -> None:
    monkeypatch.setattr(memory, "read_memory", lambda: Memory(64 << 20, 32 << 20, 0.0))
    refused = produce("run", plan, file_url, "--workers", 1)
    assert (refused.returncode, "it may use 16 MiB" in refused.stderr) == (2, True)
    done = simulate(plan, "--limit-steps", 3, "--workers", 1, "--json")
    assert (done.returncode, done.document["steps"]) == (0, 3)
