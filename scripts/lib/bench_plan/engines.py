"""What passes through the command, which should carry metadata alone; and what Ray costs beside local workers."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

from ray_nodes import RAY_PYTHON, cluster

from bench.report import Report, at_most, load
from bench_plan.faults import read_lake
from bench_plan.work import COSTLY, TEXT, command, digest, write_plan

_STEP_TOKENS = 1 << 17  # of a rank: a step of 6 MB
_SHARE = 0.01
_SLOWER = 1.25
_NODE = "3"  # CPUs: two workers and a spare


def tickets(report: Report, directory: Path, *, quick: bool) -> None:
    """With local workers: what the command reads and writes, as the kernel counts it, from the first commit on."""
    lake = directory / "lake"
    words = command(_large_steps(directory), lake, 2, 60 if quick else 200)
    seen: list[tuple[int, int]] = []  # bytes through the command, of steps, as commits come
    commits = 1
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if (found := len(list(lake.glob("*/log/*")))) > commits:  # those of workers are added when they end
                commits = found
                with suppress(OSError):
                    seen.append((_read_and_written(process.pid), _bytes_of(lake)))
            time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"bench_plan: stepfs-produce run ended with exit code {process.returncode}")
    late = max(1, len(seen) * 9 // 10 - 1)  # the last commits may be seen after workers ended
    through, made = (last - first for first, last in zip(seen[0], seen[late], strict=True))
    share = through / made
    report.figures["tickets"] = {"share": share, "load": load()}
    what = "the command's reads and writes by the bytes of the steps, uploaded by workers"
    report.add(at_most(_SHARE, what, f"{share:.3%}", f"{through >> 10} KiB", share, ""))


def ray(report: Report, directory: Path, *, quick: bool) -> None:
    """From first to last commit, in turns: starting is not compared."""
    steps = 60 if quick else 300
    took_s: dict[str, list[float]] = {"local": [], "ray": []}
    digests = set()
    with cluster(_NODE) as (address, _):
        place = directory / "plan"  # it travels
        place.mkdir()
        plan = write_plan(place, {"costly": COSTLY, "text": TEXT}, "costly: 50, text: 50", costly_s=0.004)
        for turn in range(1 if quick else 3):
            for engine, found in took_s.items():
                lake = directory / f"{engine}-{turn}"
                words = command(plan, lake, 2, steps)[1:]
                main = "from stepfs_producer.cli import main; main()"
                done = subprocess.run(
                    [str(RAY_PYTHON), "-c", main, *words, "--engine", engine],
                    env={**os.environ, "RAY_ADDRESS": address},
                    stdout=subprocess.DEVNULL,
                    check=False,
                )
                if done.returncode:
                    raise SystemExit(f"bench_plan: a run with {engine} ended with exit code {done.returncode}")
                seen = read_lake(lake)
                found.append(seen.times_s[-1] - seen.times_s[0])
                digests.add(digest(seen))
    if len(digests) > 1:
        raise SystemExit("bench_plan: the engine shows in the steps")
    report.figures["ray"] = {"seconds": took_s, "load": load()}
    ratio = median(ray / local for ray, local in zip(took_s["ray"], took_s["local"], strict=True))
    report.add(
        at_most(
            _SLOWER,
            f"Ray by local workers, {steps} steps at 4 ms a record, first to last commit",
            f"{median(took_s['ray']):.1f} s, all steps equal",
            f"{median(took_s['local']):.1f} s",
            ratio,
            "×",
        )
    )


def _large_steps(directory: Path) -> Path:
    plan = write_plan(directory, {"text": TEXT}, "text: 100")
    plan.write_text(plan.read_text().replace("tokens: 4096", f"tokens: {_STEP_TOKENS}"))
    return plan


def _read_and_written(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _bytes_of(lake: Path) -> int:
    return sum(path.stat().st_size for path in lake.rglob("*") if path.is_file() and "data" in path.parts[-3:-1])
