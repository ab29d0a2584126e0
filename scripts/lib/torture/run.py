"""The stage of a torture run: the directory, the lake, the cast; and the kills, drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quickstart.programs import BIN, is_mounted
from torture.processes import Actor, python
from torture.records import SLICES
from torture.server import Server

KILLED_KINDS = {"producer": 34, "mount": 24, "reclaimer": 24, "server": 8, "reader": 10, "sampler": 6}
COUNTED = ("producer", "mount", "reclaimer", "server")  # what --kills counts; those who read come on top
_FREEZE_SHARE = 0.12  # of all blows
_FROZEN_S = (1.0, 8.0)
_BACK_S = (0.0, 1.5)
_SERVER_BACK_S = (0.0, 4.0)
_GLANCE_S = 0.05
_RECLAIMERS = 2


@dataclass
class Stage:
    """Everything of one run."""

    directory: Path
    seed: int
    lake: str
    server: Server | None
    actors: list[Actor] = field(default_factory=list)
    blows: Counter[str] = field(default_factory=Counter)  # kill -9 by kind, and "frozen …"
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
        """Keep the cast going; a fault if `true` does not come."""
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                self.faults.append(f"{what} took more than {timeout_s:.0f} s")
                return False
            self.tend()
            time.sleep(_GLANCE_S)
        return True

    def kills(self) -> int:
        return sum(self.blows[kind] for kind in COUNTED)


@contextmanager
def staged(
    directory: Path, *, store: str, seed: int, producers: int, readers: int, rate: float, probabilities: str
) -> Iterator[Stage]:
    """A lake, and its cast ready to be started by the first `tend`; on leaving nothing runs and nothing is mounted."""
    with ExitStack() as stack:
        server = None
        lake = (directory / "lake").as_uri()
        environment = {"STEPFS_LOG_DIR": str(directory / "logs")}
        if store == "s3":
            server = Server(directory / "seaweedfs", seed=seed, probabilities=probabilities)
            stack.enter_context(server)
            lake = server.url()
            environment |= server.environment()
        stage = Stage(directory, seed, lake, server)
        stack.callback(_strike, stage)
        stepfs(environment, "init", lake, "--slices", str(SLICES), "--ext", ".bin")
        stage.actors += [_producer(stage, index, rate, environment) for index in range(producers)]
        for index in range(readers):
            mount = _mount(stage, index, environment)
            stage.actors += [mount, _reader(stage, index, environment), _sampler(stage, index, mount)]
        stage.actors += [_reclaimer(stage, index, environment) for index in range(_RECLAIMERS)]
        yield stage


def torment(stage: Stage, draw: random.Random, *, over: Callable[[], bool], every_s: float) -> None:
    """Blow after blow, at random moments, until it is over."""
    next_at = time.monotonic() + 4 * every_s  # let them begin
    while not over():
        stage.tend()
        now = time.monotonic()
        if now >= next_at:
            _blow(stage, draw, now)
            next_at = now + min(draw.expovariate(1 / every_s), 4 * every_s)
        time.sleep(_GLANCE_S)


def _blow(stage: Stage, draw: random.Random, now: float) -> None:
    if draw.random() < _FREEZE_SHARE:
        kind = draw.choices(["producer", "reclaimer", "mount"], [4, 2, 1])[0]
        able = [actor for actor in stage.of(kind) if actor.may_freeze()]
        if able:
            draw.choice(able).freeze(now, draw.uniform(*_FROZEN_S))
            stage.blows[f"frozen {kind}"] += 1
        return
    kind = draw.choices(list(KILLED_KINDS), list(KILLED_KINDS.values()))[0]
    if kind == "server":
        if stage.server is not None and stage.server.alive():
            stage.server.kill(now, draw.uniform(*_SERVER_BACK_S))
            stage.blows[kind] += 1
        return
    able = [actor for actor in stage.of(kind) if actor.alive()]
    if able:
        # Mostly those that have been at work for a while; those that are just starting get their share.
        ages = [0.5 + now - actor.started_at for actor in able]
        draw.choices(able, ages)[0].kill(now, draw.uniform(*_BACK_S))
        stage.blows[kind] += 1


def stepfs(
    environment: dict[str, str], *words: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """One command that must succeed."""
    done = run_stepfs(environment, *words, timeout_s=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"stepfs {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()}")
    return done


def run_stepfs(
    environment: dict[str, str], *words: str, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """One command, whatever becomes of it."""
    return subprocess.run(
        [str(BIN / "stepfs"), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment},
    )


def _strike(stage: Stage) -> None:
    """Take everything down, in whatever state it is."""
    for actor in stage.actors:
        actor.end()
    for directory in stage.mounts() if (stage.directory / "mnt").exists() else []:
        while is_mounted(directory):
            subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=True)


def _producer(stage: Stage, index: int, rate: float, environment: dict[str, str]) -> Actor:
    name = f"producer-{index}"
    journal = stage.directory / f"{name}.journal"
    order = {
        "name": name,
        "seed": stage.seed,
        "lake": stage.lake,
        "journal": str(journal),
        "stop": str(stage.stop),
        "rate": rate,
    }
    command = python("torture.producer", json.dumps(order))
    return Actor("producer", name, command, _log(stage, name), journal, environment)


def _mount(stage: Stage, index: int, environment: dict[str, str]) -> Actor:
    directory = stage.directory / "mnt" / f"node-{index}"
    directory.mkdir(parents=True)
    words = [stage.lake, str(directory), "--foreground", "--group", f"run-{index}"]
    words += ["--cache-dir", str(stage.cache), "--cache-size", "256M"]
    words += ["--wait", "1"] if index % 2 else []
    words += ["--no-prime"] if index % 3 == 2 else []
    words += ["--checkpoint-dir", str(_watched(stage, index))] if index % 2 else []
    name = f"mount-{index}"
    return Actor("mount", name, [str(BIN / "stepfs"), "mount", *words], _log(stage, name), None, environment)


def _reader(stage: Stage, index: int, environment: dict[str, str]) -> Actor:
    name = f"reader-{index}"
    journal = stage.directory / f"{name}.journal"
    order: dict[str, object] = {
        "seed": stage.seed,
        "mount": str(stage.directory / "mnt" / f"node-{index}"),
        "journal": str(journal),
        "end": str(stage.end),
        "every": 60 + 20 * index,
        "facts": index == 0,
    }
    if index % 2:
        watched = _watched(stage, index)
        watched.mkdir(parents=True)
        order["watched"] = str(watched)
    else:
        order["state"] = str(stage.directory / f"{name}.state")
        order["tell"] = [str(BIN / "stepfs"), "checkpoint", stage.lake, "--group", f"run-{index}"]
    return Actor(
        "reader",
        name,
        python("torture.reader", json.dumps(order)),
        _log(stage, name),
        journal,
        environment,
    )


def _sampler(stage: Stage, index: int, mount: Actor) -> Actor:
    name = f"sampler-{index}"
    journal = stage.directory / f"{name}.journal"
    order = {
        "seed": stage.seed,
        "mount": str(stage.directory / "mnt" / f"node-{index}"),
        "end": str(stage.end),
        "journal": str(journal),
    }
    command = python("torture.sampler", json.dumps(order))
    return Actor("sampler", name, command, _log(stage, name), journal, mount.environment, mount=mount)


def _watched(stage: Stage, index: int) -> Path:
    """Where every other trainer leaves its checkpoints for its mount to see; the others say them."""
    return stage.directory / "checkpoints" / f"run-{index}"


def _reclaimer(stage: Stage, index: int, environment: dict[str, str]) -> Actor:
    name = f"reclaimer-{index}"
    words = [str(BIN / "stepfs"), "reclaim", stage.lake, "--every", f"{1 + 2 * index}s"]
    words += ["--grace", "0", "--json"]
    return Actor("reclaimer", name, words, _log(stage, name), None, environment)


def _log(stage: Stage, name: str) -> Path:
    return stage.directory / f"{name}.log"
