"""A plan over a data set of the Hub (a double): by the commit that its revision was, also after the revision moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_double import REPOSITORY, TOKEN, Hub, hub_double
from lakes import produce

from stepfs_producer.run.plan_changes import _edit
from stepfs_producer.run.prepare import plan_at
from stepfs_producer.sources.files import bucket_of

PLAN = f"""\
output: {{mesh: "dp=2", sequence_length: 64}}
sources: {{web: {{format: jsonl, files: "hf://datasets/{REPOSITORY}@main/data/*.jsonl"}}}}
"""


def lines(name: str) -> bytes:
    return b"".join(json.dumps({"text": f"{name} {n} " + "x" * (n * 7 % 50)}).encode() + b"\n" for n in range(60))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    bucket_of.cache_clear()
    with hub_double() as found:
        found.private = True
        found.push("main", {f"data/{name}.jsonl": lines(name) for name in "abc"})
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found
    bucket_of.cache_clear()


def test_a_lake_is_of_the_commit_of_then(hub: Hub, tmp_path: Path, file_url: str) -> None:
    plan, said = tmp_path / "plan.yaml", []
    plan.write_text(PLAN)

    def ended(*words: object) -> tuple[int, str]:
        done = produce(*words)
        said.append(done.stdout + done.stderr)
        return done.returncode, said[-1]

    checked = produce("check", plan, "--json").document
    assert checked["sources"]["web"]["files"] == 3
    code, text = ended("run", plan, file_url, "--limit-steps", 12, "--workers", 2, "--json")
    assert (code, json.loads(text)["plan"]) == (0, checked["plan"])
    first = hub.branches["main"]
    hub.push("main", {**hub.commits[first], "data/d.jsonl": lines("d")})
    code, text = ended("run", plan, file_url, "--limit-steps", 20, "--workers", 1)
    assert (code, "warning: source web: 0/d.jsonl came after it began, and is not read" in text) == (0, True), text
    then = hub.branches["main"]  # of the steps behind
    now = hub.push("main", {f"data/{name}.jsonl": lines(name * 2) for name in "abc"})
    code, text = ended("run", plan, file_url, "--limit-steps", 25)
    assert code == 4
    assert f"hf://datasets/{REPOSITORY}@{now}/data/a.jsonl is longer than when this plan began" in text
    advice = (
        f"name the commit of then in the plan, hf://datasets/{REPOSITORY}@{then}/data/*.jsonl, or run again with --acc"
    )
    assert advice in text
    assert "all the same" in ended("replay", file_url, "--steps", "0:20", "--workers", 2)[1]
    plan.write_text(PLAN.replace("@main", f"@{then}"))
    assert ended("run", plan, file_url, "--limit-steps", 25)[0] == 0
    assert "x" in ended("lineage", file_url, "--step", 3, "--text")[1]
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [
        one for one in [*kept, *(text.encode() for text in said)] if TOKEN.encode() in one or b"Signature" in one
    ]
    assert {one.authorization for one in hub.asked("cdn")} == {None}
    assert len(hub.asked("cdn")) > 3


def test_a_run_that_looks_at_its_plan_again_does_not_ask(hub: Hub, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    place = plan_at(plan)
    asked = len(hub.requests)
    assert _edit(place, plan) == ""
    plan.write_text(PLAN + "seed: 7\n")
    assert "was edited: seed: 0 → 7" in _edit(place, plan)
    assert len(hub.requests) == asked


def test_what_needs_no_source_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    assert produce("check", plan, "--no-sources").returncode == 0
    assert not hub.requests
