"""The command behind scripts/torture --plan: a planned run tormented, then held against one that nobody disturbed."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from ray_nodes import RAY_PYTHON, cluster
from rich.console import Console

from bench.machine import BIN
from stepfs_producer.engine.api import spares_of
from torture.planned.audit import Audit, audit_planned, read_lake
from torture.planned.command import Command
from torture.planned.corpus import Corpus, write_corpus
from torture.server import Server
from torture.session import session

_GLANCE_S = 0.02
_SETTLE_S = 600.0
_KILL_LIMIT_S = {"local": 20.0, "ray": 60.0}  # of wall clock per kill before a run gives up
_SERVER_BACK_S = (0.0, 3.0)
_ALL_WORKERS = 0.25  # of the kills of workers
_TERM_SHARE = 0.1  # of the kills come with a SIGTERM behind them
_STEPS_MORE = 20  # after the last fault


@dataclass
class PlannedRun:
    """One run and its figures."""

    options: argparse.Namespace
    directory: Path
    corpus: Corpus
    command: Command
    lake: str
    server: Server | None
    killed: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    audit: Audit = field(default_factory=Audit)
    tormented_s: float = 0.0

    def tend(self) -> None:
        now = time.monotonic()
        if self.server is not None:
            self.server.tend(now)
        self.command.tend(now)

    def tend_until(self, what: str, true: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                self.faults.append(f"{what} took more than {timeout_s:.0f} s: {self.command.last_words()}")
                return
            self.tend()
            time.sleep(_GLANCE_S)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    prefix = "torture-"  # short: Ray's sockets lie below it
    with session(options, prefix, "AWS_", "STEPFS_") as found:
        with ExitStack() as stack:
            run = _prepared(stack, found.directory, options)
            began = time.monotonic()
            found.console.print(f"seed {options.seed}, {run.lake}, in {found.directory}")
            _torment(run, random.Random(options.seed))
            run.tormented_s = time.monotonic() - began
            found.console.print(f"{dict(run.killed)}; faults stop, and everything is compared")
            _settle(run)
            _compare(run)
        faults = [*run.faults, *run.command.faults, *run.audit.faults]
        found.held = not faults
        found.report(_figures(run, faults, time.monotonic() - began), faults, _show)
    return 0 if found.held else 1


def _prepared(stack: ExitStack, directory: Path, options: argparse.Namespace) -> PlannedRun:
    server = None
    lake = (directory / "lake").as_uri()
    for name in ("corpus", "t"):
        (directory / name).mkdir()
    environment = {"STEPFS_LOG_DIR": str(directory / "logs"), "TMPDIR": str(directory / "t")}
    if options.store == "s3":
        server = stack.enter_context(Server(directory / "seaweedfs", seed=options.seed, probabilities=options.proxy))
        lake = server.url()
        environment |= server.environment()
        os.environ.update(server.environment())
    corpus = write_corpus(directory / "corpus", options.seed)
    if options.engine == "ray":
        cpus = options.workers + spares_of(options.workers)
        environment["RAY_ADDRESS"], _ = stack.enter_context(cluster(str(cpus)))
    words = _words(options, corpus, lake, "--engine", options.engine, "--steps-per-second", str(options.rate))
    command = Command(words, directory / "command.log", environment)
    stack.callback(command.end)
    return PlannedRun(options, directory, corpus, command, lake, server)


def _words(options: argparse.Namespace, corpus: Corpus, lake: str, *more: str) -> list[str]:
    program = [str(BIN / "stepfs-produce")]
    if options.engine == "ray":
        main = "from stepfs_producer.cli import main; main()"
        program = [str(RAY_PYTHON), "-c", main]
    return [*program, "run", str(corpus.plan), lake, "--workers", str(options.workers), *more]


def _torment(run: PlannedRun, draw: random.Random) -> None:
    roles = ["worker", "worker", "command", *(["server"] if run.server else [])]
    kills = [roles[index % len(roles)] for index in range(run.options.kills)]
    draw.shuffle(kills)
    deadline = time.monotonic() + 60 + len(kills) * max(_KILL_LIMIT_S[run.options.engine], run.options.every)
    run.tend_until("the first step", lambda: _steps(run) > 0, _SETTLE_S)
    next_at = time.monotonic()
    while kills:
        run.tend()
        now = time.monotonic()
        if run.command.faults:
            return
        if now > deadline:
            run.faults.append(f"only {run.killed} of {run.options.kills} kills in time")
            return
        if now >= next_at and _strike(run, kills[-1], draw, now):
            run.killed[kills.pop()] += 1
            if draw.random() < _TERM_SHARE and run.command.alive() and not run.command.terminated:
                run.command.terminate()
                run.killed["SIGTERM"] += 1
            next_at = now + min(draw.expovariate(1 / run.options.every), 4 * run.options.every)
        time.sleep(_GLANCE_S)


def _strike(run: PlannedRun, role: str, draw: random.Random, now: float) -> bool:
    """One kill of that role, if there is one to be killed."""
    command = run.command
    if role == "server":
        assert run.server is not None
        if run.server.alive():
            run.server.kill(now, draw.uniform(*_SERVER_BACK_S))
            return True
        return False
    if not command.alive():
        return False
    if role == "worker":
        return command.kill_workers(draw, all_of_them=draw.random() < _ALL_WORKERS)
    command.kill(now)
    return True


def _settle(run: PlannedRun) -> None:
    """No more faults: the command goes on for some steps, is told to end, and ends as it should."""
    if run.server is not None:
        run.server.be_honest()
        run.tend_until("the server's return", run.server.alive, _SETTLE_S)
    run.tend_until("the end of a SIGTERM", lambda: not run.command.terminated, _SETTLE_S)
    run.tend_until("a restart", run.command.alive, _SETTLE_S)
    run.command.wanted = False
    run.command.terminate()
    run.tend_until("the last SIGTERM", lambda: not run.command.alive(), _SETTLE_S)
    run.tend()


def _compare(run: PlannedRun) -> None:
    limit = str(_steps(run) + _STEPS_MORE)
    undisturbed = (run.directory / "undisturbed").as_uri()
    for lake in (run.lake, undisturbed):
        done = subprocess.run(  # by local workers
            _words(run.options, run.corpus, lake, "--limit-steps", limit),
            capture_output=True,
            text=True,
            timeout=_SETTLE_S,
            check=False,
            env={**os.environ, **run.command.environment},
        )
        if done.returncode != 0:
            run.faults.append(f"{lake}: exit code {done.returncode}: {done.stderr.strip()[-800:]}")
            return
    run.audit = audit_planned(run.corpus, read_lake(run.lake), read_lake(undisturbed))
    deadline = time.monotonic() + 10
    while (left := _left(run)) and time.monotonic() < deadline:
        time.sleep(_GLANCE_S)
    run.faults += [f"left behind: {what}" for what in left]


def _left(run: PlannedRun) -> list[str]:
    """Behind any incarnation."""
    return [*run.command.remnants(), *map(str, (run.directory / "t").iterdir())]


def _steps(run: PlannedRun) -> int:
    """Committed steps."""
    done = subprocess.run([str(BIN / "stepfs"), "status", run.lake, "--json"], capture_output=True, check=False)
    return int(json.loads(done.stdout)["frontier"]) + 1 if done.returncode == 0 else 0


def _figures(run: PlannedRun, faults: list[str], wall_s: float) -> dict[str, object]:
    audit = run.audit
    return {
        "seed": run.options.seed, "store": run.options.store, "engine": run.options.engine, "held": not faults,
        "kills": dict(run.killed), "endings": dict(run.command.endings), "steps": audit.steps,
        "samples": audit.samples, "skipped": audit.skipped, "positions": audit.positions, "epochs": audit.epochs,
        "tormented_s": round(run.tormented_s, 1), "wall_s": round(wall_s, 1), "faults": faults,
    }  # fmt: skip


def _show(figures: dict[str, object]) -> None:
    for name, value in figures.items():
        Console().print(f"{name:12} {value}", highlight=False, markup=False)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture --plan", description=__doc__)
    parser.add_argument("--kills", type=int, default=60, help="of workers, command, server (default 60)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--store", choices=["s3", "file"], default="s3")
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="whose workers are killed (default local)"
    )
    parser.add_argument("--proxy", default="", help="troubles with probabilities (s3 only; default: none)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", type=float, default=10.0, help="steps per second (default 10)")
    parser.add_argument("--every", type=float, default=2.5, help="mean seconds between kills (default 2.5)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--keep", action="store_true", help="keep logs and lakes")
    options = parser.parse_args(arguments)
    if min(options.kills, options.workers) < 1 or min(options.rate, options.every) <= 0:
        parser.error("--kills and --workers start at 1; --rate and --every are above 0")
    return options
