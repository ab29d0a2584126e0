"""Bodies of Ray's workers: they stay in Ray's store, outlive their worker, are told when they are lost, and are freed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from committed import committed
from finished import ran
from ray_nodes import RAY_PYTHON, cluster
from test_ray import PLAN, ROOT

SUPPORT = str(ROOT / "tests/support")
STEPS = 6
NUMBERS = 1 << 20

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def words(*arguments: object) -> list[str]:
    given = ", ".join(repr(str(one)) for one in arguments)
    return [str(RAY_PYTHON), "-c", f"import ray_bodies; ray_bodies.main({given})"]


@pytest.fixture(scope="module")
def look() -> Iterator[Callable[..., dict]]:
    with cluster(f"3,PYTHONPATH={SUPPORT}") as (address, _):
        yield partial(looked, address)


def looked(address: str, *arguments: object) -> dict:
    done = ran(words(*arguments), env={**os.environ, "PYTHONPATH": SUPPORT, "RAY_ADDRESS": address}, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_body_stays_outlives_its_worker_and_is_freed(look) -> None:
    found = look("life")
    assert found["in store"] == [True] * 4
    assert 4 * 8 * NUMBERS <= found["bytes"] < 4 * 8 * NUMBERS + 4096
    assert found["through the command"] < 16_384
    assert found["total"] == found["total after them"] == 4 * NUMBERS
    assert "read-only" in found["overwritten"]
    assert found["died"] == [True] * 3
    assert any(found["without their machine"]), "on a busy machine Ray may not say it in time"
    assert found["small"] == [False, NUMBERS + 10]
    assert found["released"]
    assert found["left"] == [0, 0]


def test_a_hundredth_of_the_steps_passes_through_the_command(look, tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text(
        "".join(f"prose {number} " + "y" * (6000 + number * 31 % 3600) + "\n" for number in range(1000))
    )
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        PLAN.replace("sequence_length: 128, micro_batch_tokens: 512", "sequence_length: 4096, "
                     "micro_batch_tokens: 524288").replace(', transform: "my_plan_code_beside:render"', "")
    )  # fmt: skip
    lakes = [f"file://{tmp_path}/lake-{workers}" for workers in (1, 2)]
    limit = ("--limit-steps", STEPS)
    counts = [
        look("run", plan, lake, "--engine", "ray", "--workers", workers, *limit)
        for workers, lake in enumerate(lakes, 1)
    ]
    steps = [committed(lake) for lake in lakes]
    assert steps[0] == steps[1]
    size = sum(len(payload) for _, payloads in steps[0] for payload in payloads)
    for found in counts:
        assert found["code"] == 0
        assert 0 < found["through the command"] < 0.01 * size


def test_bodies_of_a_lost_node_are_told_and_no_others() -> None:
    there = f"1,PYTHONPATH={SUPPORT}"
    with (
        cluster(there, f"2,PYTHONPATH={SUPPORT}") as (address, lose),
        subprocess.Popen(
            words("node_lost", address),
            env={**os.environ, "PYTHONPATH": SUPPORT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "kept\n"
        lose(1)
        process.stdin.write("lost\n")
        process.stdin.flush()
        out, err = process.communicate(timeout=200)
    assert err == "", "losses are ours to tell"
    found = json.loads(out.splitlines()[-1])
    assert found["exactly those there"]
    assert found["with their machine"]
    assert all(found["with their machine"])
    assert found["others"]
    assert found["seconds"] < 60
