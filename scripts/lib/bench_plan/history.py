"""What it takes to ask a lake for its past: `lineage` behind a slow store, `replay` beside the run that it repeats."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from bench.machine import BIN, until
from bench.report import Report, at_least, at_most, load, median
from bench.slowed import slowed
from bench_plan.faults import WORKERS, running, steps_written, write_plan
from torture.server import Server

FILE_S = 1.0
STEP_S = 5.0
SPEED = 0.8
KILLS = 20
_LATENCY_S = 0.005
_BYTES_PER_S = 1e9
_RANKS = 64
_MIX = ["{from: 0, weights: {s00: 1, s01: 2, s02: 3, s03: 4}}"]
_WAIT_S = 300.0
_BETWEEN_KILLS = 10  # steps at least


def lineage(report: Report, directory: Path, *, quick: bool) -> None:
    """Of a rank's file, and of a step of 64 ranks, behind a store that takes 5 ms to answer."""
    rounds = 3 if quick else 7
    plan = write_plan(directory / "lineage", 4, _MIX)
    plan.write_text(plan.read_text().replace("dp=4", f"dp={_RANKS}"))
    (directory / "server").mkdir()
    with Server(directory / "server", seed=0, probabilities="", durable=False) as server:
        here = {**os.environ, **server.environment()}
        words = ["run", str(plan), server.url(), "--limit-steps", "6", "--workers", str(WORKERS)]
        subprocess.run([BIN / "stepfs-produce", *words], env=here, check=True, stdout=subprocess.DEVNULL)
        with slowed(here["AWS_ENDPOINT_URL_S3"], _BYTES_PER_S, _LATENCY_S) as slow:
            far = here | {"AWS_ENDPOINT_URL_S3": slow.url}
            file = [_timed(["lineage", server.url(), "--step", "3", "--rank", "5"], far) for _ in range(rounds)]
            step = [_timed(["lineage", server.url(), "--step", "3"], far) for _ in range(rounds)]
    report.figures["lineage"] = {"file_s": file, "step_s": step, "load": load()}
    for bound, what, took in ((FILE_S, "a rank's file", file), (STEP_S, f"a step of {_RANKS} ranks", step)):
        report.add(
            at_most(
                bound,
                f"lineage of {what}, store at {1000 * _LATENCY_S:g} ms",
                f"{median(took):.2f} s",
                f"slowest of {rounds} {max(took):.2f} s, the start of the program included",
                median(took),
                "s",
            )
        )


def replay(report: Report, directory: Path, *, quick: bool) -> None:
    """200 steps compared, and those of a lake that was made under kills."""
    steps, kills = (60, 4) if quick else (200, KILLS)
    plan = write_plan(directory / "replay", 4, _MIX)
    made, again = [], []
    for number in range(1 if quick else 3):
        lake = directory / f"undisturbed-{number}"
        started_s = time.monotonic()
        with running(plan, lake, steps, rate=None) as process:
            process.wait()
        made.append(time.monotonic() - started_s)
        started_s = time.monotonic()
        _check(_replayed(lake, plan, steps), steps)
        again.append(time.monotonic() - started_s)
    killed = directory / "killed"
    for number in range(kills):
        with running(plan, killed, None) as process:
            wanted = (number + 1) * _BETWEEN_KILLS
            until(lambda: process.poll() is not None or steps_written(killed) >= wanted, _WAIT_S)  # noqa: B023 - called here
            process.kill()
    with running(plan, killed, steps + kills * _BETWEEN_KILLS) as process:
        process.wait()
    _check(_replayed(killed, plan, steps + kills * _BETWEEN_KILLS), steps + kills * _BETWEEN_KILLS)
    report.figures["replay"] = {"made_s": made, "again_s": again, "kills": kills, "load": load()}
    report.add(
        at_least(
            SPEED,
            f"replay --compare of {steps} steps, speed beside the run's",
            f"{steps / median(again):.1f} steps/s",
            f"{steps / median(made):.1f} steps/s; also after {kills} kills 0 of {steps + kills * _BETWEEN_KILLS} differ",
            median(made) / median(again),
        )
    )


def _timed(words: list[str], environment: dict[str, str]) -> float:
    started_s = time.monotonic()
    subprocess.run([BIN / "stepfs-produce", *words], env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - started_s


def _replayed(lake: Path, plan: Path, steps: int) -> dict[str, object]:
    words = ["replay", lake.as_uri(), "--steps", f"0:{steps}", "--plan-dir", str(plan.parent), "--json"]
    words += ["--workers", str(WORKERS)]
    done = subprocess.run([BIN / "stepfs-produce", *words], check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def _check(found: dict[str, object], steps: int) -> None:
    if found["steps"] != steps or found["different"]:
        raise SystemExit(
            f"bench_plan: of {steps} steps {found['steps']} were made again, and {found['different']} differ"
        )
