"""One torture run: its directory, lake and processes; and the faults, drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import BIN, is_mounted, program
from torture.processes import Actor
from torture.records import SLICES
from torture.server import Server

KILLED_KINDS = {"producer": 34, "mount": 24, "reclaimer": 24, "server": 8, "reader": 10, "sampler": 6}
COUNTED = ("producer", "mount", "reclaimer", "server")  # what --kills counts; those who read come on top
_FREEZE_SHARE = 0.12  # of all faults
_REPLACE_SHARE = 0.15
_ANSWERED_S = 10.0  # a mount goes on within that time, whatever of it was killed
_DAEMON_SHARE = 0.7  # of the kills of a mount; the others are of its keeper
_FROZEN_S = (1.0, 8.0)
_BACK_S = (0.0, 1.5)
_SERVER_BACK_S = (0.0, 4.0)
_GLANCE_S = 0.05
_RECLAIMERS = 2
ROOT = Path(__file__).parents[3]
_CONSTANTS = ROOT / "tests/support/changed_constants"
_GRACE_S = 20  # more than a frozen mount and an absent store: until then an open file's bytes are there (SEMANTICS, 7)


@dataclass
class Run:
    """Everything of one run."""

    directory: Path
    seed: int
    lake: str
    server: Server | None
    actors: list[Actor] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)  # kill -9 by kind, and "frozen …"
    faults: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Actor]:
        return [actor for actor in self.actors if actor.kind == kind]

    @property
    def stop(self) -> Path:
        return self.directory / "stop"

    @property
    def end(self) -> Path:
        return self.directory / "end"

    @property
    def cache(self) -> Path:
        return self.directory / "cache"

    def mounts(self) -> list[Path]:
        return sorted((self.directory / "mnt").iterdir())

    def tend(self) -> None:
        now = time.monotonic()
        if self.server is not None:
            self.server.tend(now)
        for actor in self.actors:
            actor.tend(now)

    def tend_until(self, what: str, true: Callable[[], bool], timeout_s: float) -> bool:
        """Keep all processes going; an entry in `faults` if `true` does not come."""
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                self.faults.append(f"{what} took more than {timeout_s:.0f} s")
                return False
            self.tend()
            time.sleep(_GLANCE_S)
        return True

    def kills(self) -> int:
        return sum(self.injected[kind] for kind in COUNTED)


@contextmanager
def prepared_run(
    directory: Path, *, store: str, seed: int, producers: int, readers: int, rate: float, probabilities: str
) -> Iterator[Run]:
    """A lake, and processes that the first `tend` starts; on leaving nothing runs and nothing is mounted."""
    with ExitStack() as stack:
        server = None
        lake = (directory / "lake").as_uri()
        environment = {"STEPFS_LOG_DIR": str(directory / "logs")}
        if store != "file":
            server = Server(directory / "seaweedfs", seed=seed, probabilities=probabilities, store=store)
            stack.enter_context(server)
            lake = server.url()
            environment |= server.environment()
        run = Run(directory, seed, lake, server)
        stack.callback(_tear_down, run)
        stepfs(environment, "init", lake, "--slices", str(SLICES), "--ext", ".bin")
        run.actors += [_producer(run, index, rate, environment) for index in range(producers)]
        for index in range(readers):
            run.actors += [part(run, index, environment) for part in (_mount, _reader, _sampler)]
        run.actors += [_reclaimer(run, index, environment) for index in range(_RECLAIMERS)]
        yield run


def inject_faults(run: Run, draw: random.Random, *, over: Callable[[], bool], every_s: float) -> None:
    """Fault after fault, at random moments, until `over`."""
    next_at = time.monotonic() + 4 * every_s  # let them begin
    while not over():
        run.tend()
        now = time.monotonic()
        if now >= next_at:
            _inject_one(run, draw, now)
            next_at = now + min(draw.expovariate(1 / every_s), 4 * every_s)
        time.sleep(_GLANCE_S)


def _inject_one(run: Run, draw: random.Random, now: float) -> None:
    if draw.random() < _FREEZE_SHARE:
        kind = draw.choices(["producer", "reclaimer", "mount"], [4, 2, 1])[0]
        able = [actor for actor in run.of(kind) if actor.may_freeze()]
        if able:
            draw.choice(able).freeze(now, draw.uniform(*_FROZEN_S))
            run.injected[f"frozen {kind}"] += 1
        return
    if draw.random() < _REPLACE_SHARE:
        able = [actor for actor in run.of("mount") if actor.may_freeze()]
        if able:
            draw.choice(able).replace(by_the_other=draw.random() < 0.5)
            run.injected["replaced mount"] += 1
        return
    kind = draw.choices(list(KILLED_KINDS), list(KILLED_KINDS.values()))[0]
    if kind == "server":
        if run.server is not None and run.server.may_be_killed():
            run.server.kill(now, draw.uniform(*_SERVER_BACK_S))
            run.injected[kind] += 1
        return
    able = [actor for actor in run.of(kind) if actor.alive()]
    if able:
        # Mostly those that have been at work for a while; those that are just starting get their share.
        ages = [0.5 + now - actor.started_at for actor in able]
        actor = draw.choices(able, ages)[0]
        if actor.serves is not None and not _keeper_is_hit(run, actor, draw, now):
            return
        if actor.replaced and draw.random() < 0.5:
            actor.kill_replaced()
        else:
            actor.kill(now, draw.uniform(*_BACK_S))
        run.injected[kind] += 1


def _keeper_is_hit(run: Run, actor: Actor, draw: random.Random, now: float) -> bool:
    """False if it is a daemon of the mount that is killed here, or nothing: one blow has been dealt just now."""
    if now - actor.hit_at < _ANSWERED_S:
        return False
    actor.hit_at = now
    if draw.random() < _DAEMON_SHARE:
        run.injected[actor.kind] += actor.kill_daemon()
        return False
    return True


def stepfs(environment: dict[str, str], *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """One command that must succeed."""
    done = run_stepfs(environment, *words, timeout_s=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"stepfs {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done


def run_stepfs(environment: dict[str, str], *words: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """One command, whatever becomes of it."""
    return subprocess.run(
        [str(BIN / "stepfs"), *words], capture_output=True, text=True, timeout=timeout_s, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def _tear_down(run: Run) -> None:
    """Take everything down, in whatever state it is."""
    for actor in run.actors:
        actor.end()
    for directory in run.mounts() if (run.directory / "mnt").exists() else []:
        while is_mounted(directory):
            subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=True)


def _producer(run: Run, index: int, rate: float, environment: dict[str, str]) -> Actor:
    name = f"producer-{index}"
    journal = run.directory / f"{name}.journal"
    order = {
        "name": name, "seed": run.seed, "lake": run.lake, "journal": str(journal), "stop": str(run.stop),
        "rate": rate,
    }  # fmt: skip
    command = program("torture.producer", json.dumps(order))
    return Actor("producer", name, command, _log(run, name), journal, environment)


def _mount(run: Run, index: int, environment: dict[str, str]) -> Actor:
    directory = run.directory / "mnt" / f"node-{index}"
    directory.mkdir(parents=True)
    # A daemon that is killed is followed by another one of its keeper, and a keeper by another one of its daemon, which gives
    # the mount to this command once more: readers notice neither.
    words = [run.lake, str(directory), "--foreground", "--replace", "--group", f"run-{index}"]
    words += ["--cache-dir", str(run.cache), "--cache-size", "256M"]
    words += ["--wait", "1"] if index % 2 else []
    words += ["--no-prime"] if index % 3 == 2 else []
    words += ["--checkpoint-dir", str(_watched(run, index))] if index % 2 else []
    name = f"mount-{index}"
    patient = {"PYTHONPATH": os.pathsep.join([str(_CONSTANTS), os.environ.get("PYTHONPATH", "")])}
    # An outage of the store may last longer than a keeper tries, which then cuts the connection as it should.
    limits = {"DEATHS": 1_000_000, "PATIENCE_S": 300.0}
    patient["TESTS_CONSTANTS"] = json.dumps({f"stepfs.mount.launch:{name}": one for name, one in limits.items()})
    return Actor(
        "mount", name, [str(BIN / "stepfs"), "mount", *words], _log(run, name), None, environment | patient, serves=directory,
        other={"PYTHONPATH": os.pathsep.join([*map(str, _other_version(run)), patient["PYTHONPATH"]])},
    )  # fmt: skip


def _other_version(run: Run) -> list[Path]:
    """The packages' folders, copied, with what a later version might change: its number, and the name of an option."""
    copy = run.directory / "other"
    if not copy.exists():
        for package in ("fs", "producer"):
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        for name, old, new in _LATER:
            path = copy / "fs/stepfs" / name
            text = path.read_text()
            assert old in text, (name, old)
            path.write_text(text.replace(old, new))
    return [copy / "fs", copy / "producer"]


_LATER = (
    ("__init__.py", '__version__ = "', '__version__ = "9.'),
    ("mount/options.py", "    metrics_address: Annotated[", "    metrics_at: Annotated["),
    ("mount/daemon/session.py", "options.metrics_address", "options.metrics_at"),
)


def _reader(run: Run, index: int, environment: dict[str, str]) -> Actor:
    name = f"reader-{index}"
    journal = run.directory / f"{name}.journal"
    order: dict[str, object] = {
        "seed": run.seed, "mount": str(run.directory / "mnt" / f"node-{index}"), "journal": str(journal),
        "end": str(run.end), "every": 60 + 20 * index, "facts": index == 0,
    }  # fmt: skip
    if index % 2:
        watched = _watched(run, index)
        watched.mkdir(parents=True)
        order["watched"] = str(watched)
    else:
        order["state"] = str(run.directory / f"{name}.state")
        order["tell"] = [str(BIN / "stepfs"), "checkpoint", run.lake, "--group", f"run-{index}"]
    return Actor(
        "reader", name, program("torture.reader", json.dumps(order)), _log(run, name), journal, environment,
    )  # fmt: skip


def _sampler(run: Run, index: int, environment: dict[str, str]) -> Actor:
    name = f"sampler-{index}"
    journal = run.directory / f"{name}.journal"
    order = {
        "seed": run.seed,
        "mount": str(run.directory / "mnt" / f"node-{index}"),
        "end": str(run.end),
        "journal": str(journal),
    }
    command = program("torture.sampler", json.dumps(order))
    return Actor("sampler", name, command, _log(run, name), journal, environment)


def _watched(run: Run, index: int) -> Path:
    """Where every other trainer leaves its checkpoints for its mount to see; the others say them."""
    return run.directory / "checkpoints" / f"run-{index}"


def _reclaimer(run: Run, index: int, environment: dict[str, str]) -> Actor:
    name = f"reclaimer-{index}"
    words = [str(BIN / "stepfs"), "reclaim", run.lake, "--every", f"{1 + 2 * index}s"]
    words += ["--grace", f"{_GRACE_S}s", "--json"]
    return Actor("reclaimer", name, words, _log(run, name), None, environment)


def _log(run: Run, name: str) -> Path:
    return run.directory / f"{name}.log"
