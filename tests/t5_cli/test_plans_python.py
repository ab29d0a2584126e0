"""`stepfs_producer.plans`: a plan from Python is the plan of the file, and runs as the command runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from committed import committed
from plans import run

from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs_producer import Jsonl, Mix, Output, Plan, PlanError, Text

SCRIPT = """\
from stepfs_producer import Jsonl, Mix, Output, Plan, Text
plan = Plan(
    output=Output(ext=".npy", mesh="dp=2", sequence_length=128, micro_batch_tokens=512),
    sources={"code": Jsonl("code/"), "prose": Text("prose.txt", records="lines")},
    mix=[Mix(weights={"code": 30, "prose": 70})],
)
"""


@pytest.fixture
def python_plan(plan, monkeypatch):
    monkeypatch.chdir(plan.parent)
    found: dict[str, object] = {}
    exec(SCRIPT, found)  # what the tests below start as a script
    return found["plan"]


def test_it_makes_the_steps_of_the_file_and_continues_them(python_plan, plan, tmp_path):
    lake, whole = (f"file://{tmp_path}/{name}" for name in ("python", "whole"))
    assert run(plan, whole, "--limit-steps", 6).returncode == 0
    said = python_plan.run(lake, workers=1, limit_steps=4, memory="1G")
    assert (said["ending"], said["run"]["steps"], said["producer"]) == ("limit", 4, "plan")
    assert run(plan, lake, "--limit-steps", 6).returncode == 0, "the same plan, so no changes to accept"
    assert committed(lake) == committed(whole)


def test_it_simulates_what_it_runs(python_plan, file_url):
    simulated = python_plan.simulate(steps=5, workers=1)
    ran = python_plan.run(file_url, workers=1, limit_steps=5)
    same = ("plan", "sources", "fill", "slowest_to_mean")
    assert {name: simulated[name] for name in same} == {name: ran[name] for name in same}


def test_errors_come_bare_with_their_own_class(python_plan, plan, file_url):
    python_plan.run(file_url, workers=1, limit_steps=1)
    settings = {"sources": python_plan.sources, "mix": python_plan.mix}
    other = Plan(output=Output(ext=".npy", mesh="dp=2", sequence_length=64), **settings)
    with pytest.raises(RefusedError, match="the plan changed since step 1"):
        other.run(file_url, workers=1, limit_steps=2)
    absent = Plan(output=python_plan.output, sources={"code": Jsonl("gone/")})
    with pytest.raises(AbsentError, match="gone"):
        absent.simulate(steps=1, workers=1)
    with pytest.raises(UsageError, match="memory"):
        python_plan.run(file_url, workers=1, memory=1 << 20)
    with pytest.raises(UsageError, match="at least 1"):
        python_plan.simulate(steps=0)


def test_all_mistakes_of_a_plan_are_told_at_once():
    with pytest.raises(PlanError, match="the plan has 3 mistakes") as caught:
        Plan(  # type: ignore[call-arg]
            output=Output(mesh="dp=2", sequence_length=64),
            sources={"code": Text("a.txt")},
            mix=[Mix(weights={"cod": 1})],
            sead=7,
        )
    assert caught.value.lines == (
        "sead: unknown key 'sead'; did you mean 'seed'?",
        "mix[0].weights.cod: unknown source 'cod'; did you mean 'code'?",
        "sources.code: source 'code' has no weight; give it one in the mix (0 keeps it out)",
    )


def test_it_runs_in_another_thread_too(python_plan, file_url):
    said: list[object] = []
    thread = threading.Thread(
        target=lambda: said.append(python_plan.run(file_url, workers=1, limit_steps=2)["total"]["steps"])
    )
    thread.start()
    thread.join()
    assert said == [2]


def script(directory: Path, text: str) -> subprocess.Popen[str]:
    (directory / "script.py").write_text(SCRIPT + text)
    command = [sys.executable, "script.py"]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)],
)
def test_a_signal_ends_a_script_between_two_steps(plan, tmp_path, number, code):
    lake = tmp_path / "lake"
    text = f"if __name__ == '__main__':\n    plan.run('file://{lake}', workers=1, steps_per_second=10)\n"
    process = script(plan.parent, text)
    while process.poll() is None and not list(lake.glob("*/log/*2")):
        time.sleep(0.02)  # looking without a pause takes the core that the script needs
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    assert len(committed(f"file://{lake}")) >= 2


@pytest.mark.nightly  # its workers die until the run gives up
def test_a_script_without_a_guard_is_told_so_and_runs_nothing_twice(plan, tmp_path):
    text = f"import json; print(json.dumps(plan.run('file://{tmp_path}/lake', workers=1, limit_steps=2)))\n"
    out, err = script(plan.parent, text).communicate(timeout=280)
    assert "if __name__ == '__main__':" in err
    assert not out or json.loads(out)["total"]["steps"] == 2
