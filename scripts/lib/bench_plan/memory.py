"""Memory of a run against that of DataLoaders with equal shuffle windows: proportional set sizes, summed.

Each worker of each rank has a window of every source, a run has two blocks of every source in all. The ranks are equal,
so two are measured, and scaled.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path

from bench.machine import BIN, MIB, family, program
from bench.report import Report, at_least
from bench_plan.corpora import parquet_plan, write_parquet

RANKS, MEASURED, WORKERS = 8, 2, 4
SOURCES = 64
GROUPS = 6  # row groups of 1 MiB, of each source
WINDOW = MIB
BOUND = 13.5
INTERVAL_S = 0.5


def run(report: Report, directory: Path, *, quick: bool) -> None:
    sources = 8 if quick else SOURCES
    paths = write_parquet(directory / "corpora", sources, GROUPS)
    ours = _of_run(directory, paths, steps=10 if quick else 60)
    theirs = _of_loaders(directory / "corpora") * RANKS // MEASURED
    report.figures["memory"] = {"ours": ours, "theirs": theirs}
    what = f"memory (PSS), {sources} Parquet sources, {RANKS} ranks × {WORKERS} workers"
    against = f"DataLoader {theirs / MIB:,.0f} MiB, from {MEASURED} ranks"
    row = at_least(BOUND, what, f"{ours / MIB:,.0f} MiB at most", against, theirs / ours)
    report.add(row)


def _of_run(directory: Path, paths: list[Path], steps: int) -> int:
    """Bytes at most, of the command and its workers."""
    plan = directory / "plan.yaml"
    plan.write_text(parquet_plan(paths, len(paths), f"{WINDOW // MIB}MiB", 65536))
    command = [str(BIN / "stepfs-produce"), "run", str(plan), f"file://{directory}/lake"]
    options = ["--workers", str(WORKERS), "--limit-steps", str(steps)]
    most = 0
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            most = max(most, pss(running.pid))
            time.sleep(INTERVAL_S)
    if running.returncode:
        raise SystemExit(f"benchmark: stepfs-produce run ended with {running.returncode}")
    return most


def _of_loaders(corpora: Path) -> int:
    """Bytes of the measured ranks when all windows are full."""
    command = program("bench_plan.windows", str(corpora), str(WINDOW), str(WORKERS))
    ranks = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(MEASURED)]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            if not rank.stdout.readline():
                raise SystemExit("benchmark: a DataLoader ended before its windows were full")
        return sum(pss(rank.pid) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def pss(pid: int) -> int:
    """Proportional set size of a process and all that come from it."""
    total = 0
    for member in family(pid):
        with suppress(OSError, StopIteration):  # ended meanwhile
            lines = Path(f"/proc/{member}/smaps_rollup").read_text(encoding="ascii").splitlines()
            total += 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total
