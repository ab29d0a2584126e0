"""The doors into other people's trainers: killed, and started again by another number of processes, each reads the very
micro-batches that come next.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import nightly
import pytest
from lakes import produce
from realmount import until
from safetensors.torch import load

from stepfs import Lake
from stepfs.torch import micro_batches

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts/examples"
STEPS, HALF, SLICES = 6, 3, 4
CALM = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
DOORS = [  # program, the module that it needs, the numbers of processes before and after
    ("train_grain.py", "grain", 2, 4),
    ("train_grain.py", "grain", 1, 1),
    ("train_megatron.py", "torch", 4, 2),
    ("train_trl.py", "trl", 1, 1),
]


def produced(url: str, corpus: Path, steps: int) -> None:
    options = ["--slices", SLICES, "--seq-len", 64, "--limit-steps", steps]
    assert produce("text", url, "--input", corpus, *options).code == 0


def printed(output: Path) -> Counter[tuple[int, str]]:
    found = re.findall(r"^step (\d+) (\w{8})$", output.read_text() if output.exists() else "", re.MULTILINE)
    return Counter((int(step), crc) for step, crc in found)


def printed_by(job: list[tuple[subprocess.Popen[bytes], Path]]) -> Counter[tuple[int, str]]:
    return sum((printed(output) for _, output in job), Counter())


def ids_of(lake: Lake) -> Counter[tuple[int, str]]:
    return Counter(
        (int(step), f"{zlib.crc32(batch['input_ids'].numpy().tobytes()):08x}")
        for step in lake
        for rank in range(SLICES)
        for batch in micro_batches(load(bytes(step[rank])))
    )


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "needs", "before", "after"), DOORS)
def test_a_killed_job_goes_on_with_the_ids_that_come_next(program, needs, before, after, file_url, tmp_path):
    nightly.needs(needs)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "text").write_text(" ".join(map(str, range(9000))))
    produced(file_url, corpus, HALF)
    jobs: list[subprocess.Popen[bytes]] = []

    def start(name: str, world: int) -> list[tuple[subprocess.Popen[bytes], Path]]:
        job = []
        for rank in range(world):
            output, state = tmp_path / f"{name}-{rank}", tmp_path / "state"
            ranks = CALM | ({"RANK": str(rank), "WORLD_SIZE": str(world)} if world > 1 else {})
            command = [sys.executable, EXAMPLES / program, file_url, state, str(STEPS)]
            with output.open("wb") as said:
                job.append(
                    (subprocess.Popen(command, env=ranks, stdout=said, stderr=said, start_new_session=True), output)
                )
        jobs.extend(process for process, _ in job)
        return job

    with Lake(file_url) as lake:
        try:
            there = ids_of(lake)
            first = start("before", before)
            until(
                lambda: printed_by(first) == there,
                lambda: "".join(output.read_text() for _, output in first),
                within_s=100,
            )
            for process, _ in first:
                os.killpg(process.pid, signal.SIGKILL)
            produced(file_url, corpus, STEPS)
            second = start("after", after)
            for process, output in second:
                assert process.wait(200) == 0, output.read_text()
        finally:
            for process in jobs:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        expected = ids_of(lake)
    once, again = printed_by(first), printed_by(second)
    assert {step for step, _ in again} >= set(range(HALF, STEPS))
    assert once | again == expected
    for found in (once, again):  # whole steps, and none twice
        assert found == Counter(
            {one: count for one, count in expected.items() if one[0] in {step for step, _ in found}}
        )
