"""What deaths and a jump of weights cost a planned run: the longest gap between steps, and the way back to the next commit.

Steps are timed by their commits' own times, on one clock. Bytes are compared with a run that nobody disturbed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from bench.machine import BIN, until
from bench.report import Report, at_most, load, median
from spans_audit import payloads_of, pieces_of
from stepfs.format.ids import Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from torture.planned.command import workers_of

WORKERS = 2
GAP_S = 1.0
BACK_S = 5.0
JUMP_S = 2.0
_STEPS_PER_SECOND = 20
_KILL_EVERY_S = 4.0  # longer than a new spare takes to start: what is measured is a death beside a warm spare
_JUMP_AT = 100  # step
_AROUND = 20  # steps
_WAIT_S = 300.0
_UNDER_WAY = 2 * WORKERS  # steps between a plan and its append

PLAN = """\
version: 1
output: {{ext: .safetensors, mesh: "dp=4", sequence_length: 1024, micro_batch_tokens: 4096}}
defaults: {{shuffle: {{block: 256KiB}}}}
sources:
{sources}
mix:
{mix}
"""


@dataclass(frozen=True, slots=True)
class Lake:
    """Steps of a lake: when each was committed, digests of its payloads, tokens per source."""

    times_s: list[float]
    digests: list[str]
    tokens: list[Counter[str]]

    def gaps_s(self, first: int = 0, end: int | None = None) -> list[float]:
        times = self.times_s[first:end]
        return [after - before for before, after in itertools.pairwise(times)]


def run(report: Report, directory: Path, *, quick: bool) -> None:
    _loaders(report, directory, steps=150 if quick else 400)
    _command(report, directory, rounds=2 if quick else 5)
    _jump(report, directory)


def _loaders(report: Report, directory: Path, *, steps: int) -> None:
    plan = write_plan(directory / "loaders", 4, ["{from: 0, weights: {s00: 1, s01: 2, s02: 3, s03: 4}}"])
    disturbed(report, "loader killed with -9", plan, steps, _kill_one_worker, every_s=_KILL_EVERY_S, gap_s=GAP_S)


def disturbed(
    report: Report, what: str, plan: Path, steps: int, disturb: Callable[[int], int], *, every_s: float, gap_s: float
) -> None:
    """The longest gap between steps of a run to which something is done again and again; its steps are a calm run's."""
    lakes, times = {}, 0
    for name in ("undisturbed", "disturbed"):
        with running(plan, plan.parent / name, steps) as process:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every_s)
                if name == "disturbed" and process.poll() is None:
                    times += disturb(process.pid)
        lakes[name] = read_lake(plan.parent / name)
    before, after = lakes["undisturbed"], lakes["disturbed"]
    if before.digests != after.digests:
        raise SystemExit(f"bench_plan: {what}: a step changed or is lost")
    longest = max(after.gaps_s())
    report.figures[what] = {
        "times": times, "gaps_s": after.gaps_s(), "undisturbed_s": before.gaps_s(), "load": load(),
    }  # fmt: skip
    text = f"undisturbed {max(before.gaps_s()):.2f} s; {len(after.digests)} steps equal"
    row = f"{what}, {times} times: longest gap between steps"
    report.add(at_most(gap_s, row, f"{longest:.2f} s", text, longest, "s"))


def _command(report: Report, directory: Path, *, rounds: int) -> None:
    weights = ", ".join(f"s{number:02}: {number + 1}" for number in range(16))
    plan = write_plan(directory / "command", 16, [f"{{from: 0, weights: {{{weights}}}}}"])
    lake = directory / "again"
    back, steps = [], 20
    for _ in range(rounds):
        with running(plan, lake, None) as process:
            until(lambda: process.poll() is not None or steps_written(lake) >= steps, _WAIT_S)  # noqa: B023 - called here
            process.kill()
        started_s = time.time()
        steps = len(read_lake(lake).times_s) + 20
        with running(plan, lake, steps) as process:
            process.wait()
        back.append(next(at for at in read_lake(lake).times_s if at > started_s) - started_s)
        steps = steps_written(lake) + 20
    report.figures.setdefault("faults", {})["command"] = {"back_s": back, "load": load()}
    report.add(
        at_most(
            BACK_S,
            f"command killed with -9 → next commit, 16 sources, {rounds} times",
            f"{max(back):.2f} s",
            f"median {median(back):.2f} s, from the start of the next command",
            max(back),
            "s",
        )
    )


def _jump(report: Report, directory: Path) -> None:
    mix = ["{from: 0, weights: {s00: 5, s01: 95}}", f"{{from: {_JUMP_AT}, weights: {{s00: 60, s01: 40}}}}"]
    plan = write_plan(directory / "jump", 2, mix)
    with running(plan, directory / "jumped", _JUMP_AT + 2 * _AROUND) as process:
        process.wait()
    lake = read_lake(directory / "jumped")
    shares = []
    for first in (_JUMP_AT - _AROUND, _JUMP_AT):
        tokens = sum(lake.tokens[first : first + _AROUND], Counter())
        shares.append(tokens["s00"] / tokens.total())
    visible = lake.times_s[_JUMP_AT] - lake.times_s[_JUMP_AT - _UNDER_WAY - 1]
    around = lake.gaps_s(_JUMP_AT - 1, _JUMP_AT + _AROUND)
    report.figures.setdefault("faults", {})["jump"] = {
        "visible_s": visible,
        "gaps_s": lake.gaps_s(),
        "shares": shares,
        "load": load(),
    }
    report.add(
        at_most(
            JUMP_S,
            f"weight jump {shares[0]:.1%} → {shares[1]:.1%}: from room for its step to the step in the lake",
            f"{visible:.2f} s",
            f"longest gap of the {_AROUND} steps from it on {max(around):.2f} s, median gap {median(lake.gaps_s()):.2f}",
            visible,
            "s",
        )
    )


def write_plan(directory: Path, sources: int, mix: list[str]) -> Path:
    """A plan over so many sources s00, s01, … of 1 MiB of text each."""
    directory.mkdir()
    names = [f"s{number:02}" for number in range(sources)]
    write_texts(directory, names, lambda draw: int(draw.lognormvariate(6, 1)) % 8000)
    listed = "\n".join(f"  {name}: {{format: jsonl, files: {name}/}}" for name in names)
    path = directory / "plan.yaml"
    path.write_text(PLAN.format(sources=listed, mix="\n".join(f"  - {entry}" for entry in mix)))
    return path


def write_texts(directory: Path, sources: Iterable[str], size_of: Callable[[random.Random], int]) -> None:
    """1 MiB of records for each of them, with texts of these sizes."""
    draw = random.Random(5)
    letters = "".join(draw.choices("etaoinshrdlu     ", k=1 << 16))
    for name in sources:
        (directory / name).mkdir()
        with (directory / name / "a.jsonl").open("w") as file:
            while file.tell() < 1 << 20:
                begin, size = draw.randrange(1 << 15), size_of(draw)
                file.write(json.dumps({"text": letters[begin : begin + size]}) + "\n")


@contextmanager
def running(
    plan: Path, lake: Path, steps: int | None, rate: int | None = _STEPS_PER_SECOND
) -> Iterator[subprocess.Popen[bytes]]:
    words = [str(BIN / "stepfs-produce"), "run", str(plan), lake.as_uri(), "--workers", str(WORKERS)]
    words += [] if rate is None else ["--steps-per-second", str(rate)]
    words += [] if steps is None else ["--limit-steps", str(steps)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
        if process.wait() not in {0, -signal.SIGKILL}:
            raise SystemExit(f"bench_plan: stepfs-produce run ended with exit code {process.returncode}")


def steps_written(lake: Path) -> int:
    return len(list(lake.glob("*/data/*/*.tgb")))


def _kill_one_worker(pid: int) -> int:
    workers = workers_of(pid)
    for worker in workers[:1]:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    return len(workers[:1])


def read_lake(directory: Path) -> Lake:
    return trio.run(_read, directory.as_uri())


async def _read(url: str) -> Lake:
    found = Lake([], [], [])
    store = open_store(url)
    identity = await open_lake(store)
    log = await LogReader.open(store, identity)
    for number in range(log.state.next_step):
        entry = await log.entry(Step(number))
        payloads = await payloads_of(store, entry.tgb)
        found.times_s.append(entry.time_ms / 1000)
        found.digests.append(hashlib.sha256(b"".join(payloads)).hexdigest())
        tokens: Counter[str] = Counter()
        for payload in payloads:
            for piece in pieces_of(identity.ext, payload):
                tokens[piece.address[0]] += len(piece.ids)
        found.tokens.append(tokens)
    await store.aclose()
    return found
