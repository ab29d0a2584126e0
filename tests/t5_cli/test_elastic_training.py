"""A job is killed and comes back with half or twice as many data ranks: the same global batches, and the same losses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from lakes import produce
from realmount import mounted

from stepfs import Lake

TRAIN = Path(__file__).with_name("train_elastic.py")
STOP = 7
PLAN = """\
version: 1
output: {ext: .safetensors, mesh: "dp=2", sequence_length: 64, micro_batches: 4, files: FILES}
sources: {prose: {format: text, records: lines, files: prose.txt}}
until: {steps: 7}
"""
Steps = dict[int, tuple[float, str]]


@pytest.fixture(params=["micro_batches", "ranks"])
def lake(request, tmp_path) -> str:
    """Steps of 2 × 4 micro-batches, in files of either kind."""
    lines = (f"{number} " + "xyz "[number % 4] * (number * 31 % 90) + "\n" for number in range(400))
    (tmp_path / "prose.txt").write_text("".join(lines))
    (tmp_path / "plan.yaml").write_text(PLAN.replace("FILES", request.param))
    url = (tmp_path / "lake").as_uri()
    assert produce("run", tmp_path / "plan.yaml", url, "--workers", 1).code == 0
    return url


@contextmanager
def job(source: str, checkpoints: Path, mesh: str) -> Iterator[subprocess.Popen[str]]:
    """A training job in a process group of its own; nothing of it is left."""
    checkpoints.mkdir(exist_ok=True)
    command = [sys.executable, str(TRAIN), source, str(checkpoints), str(STOP), mesh]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def trained(source: str, checkpoints: Path, mesh: str) -> Steps:
    with job(source, checkpoints, mesh) as process:
        said, wrong = process.communicate(timeout=240)
        assert process.returncode == 0, wrong
    return {step: (loss, digest) for step, loss, digest in map(json.loads, said.splitlines())}


def killed(source: str, checkpoints: Path, mesh: str, behind: int) -> None:
    """Train until behind this step, and behind the checkpoint before it, then kill all processes at once."""
    with job(source, checkpoints, mesh) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)[0] == behind:
                return
        raise AssertionError(process.communicate()[1])


def agree(found: Steps, expected: Steps, first: int) -> None:
    assert sorted(found) == list(range(first, STOP))
    for step, (loss, digest) in found.items():
        assert digest == expected[step][1], f"step {step} is another global batch"
        assert loss == pytest.approx(expected[step][0], rel=1e-12, abs=0)


@pytest.mark.nightly  # t3's test_elastic and t4's test_meshes have the rules
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("through", ["mount", "data set"])
def test_a_mesh_with_peers_comes_back_with_half_and_twice_as_many_data_ranks(lake, tmp_path, through):
    with Lake(lake) as opened:
        whole = opened.micro_batches == 1  # a mount of files of ranks refuses more data ranks

    def source(data: int):
        if through == "data set" or (whole and data > 2):
            return nullcontext(lake)
        return mounted(lake, tmp_path / f"mount-{data}", "--mesh", f"tp=2,dp={data},cp=2", "--steps", f"0:{STOP}")

    def place(opened) -> str:
        return opened if isinstance(opened, str) else str(opened.directory)

    with source(2) as opened:
        expected = trained(place(opened), tmp_path / "undisturbed", "tp=2,dp=2,cp=2")
        killed(place(opened), tmp_path / "killed", "tp=2,dp=2,cp=2", behind=4)
    for data in (1, 4):
        shutil.copytree(tmp_path / "killed", tmp_path / f"dp-{data}")
        with source(data) as opened:
            agree(trained(place(opened), tmp_path / f"dp-{data}", f"tp=2,dp={data},cp=2"), expected, first=4)
