"""The command behind scripts/torture: real processes on a real store, killed at random, then every byte audited."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from quickstart.programs import is_mounted, processes_naming
from torture.audit import Audit, audit_journals, audit_lake
from torture.proxy import parse_probabilities
from torture.records import notes
from torture.run import COUNTED, Stage, run_stepfs, staged, stepfs, torment
from torture.table import print_table

PROXY = (
    "reset before=0.003,reset after=0.004,500 after apply=0.003,500=0.002,lost response=0.0004,lost request=0.0004,"
    "409=0.01,503=0.004,short body=0.003,late=0.001,slow=0.01"
)
_KILL_LIMIT_S = 12.0  # of wall clock per kill before a run gives up
_SETTLE_S = 600.0  # each stage of coming to rest, on a machine with other work to do
_SHOWN_MAX = 20


@dataclass
class Outcome:
    """What a run came to."""

    audit: Audit = field(default_factory=Audit)
    faults: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    tormented_s: float = 0.0
    wall_s: float = 0.0


def main() -> int:
    options = _parse()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    console = Console(stderr=True, highlight=False)
    directory = Path(tempfile.mkdtemp(prefix="stepfs-torture-"))
    started = time.monotonic()
    held = False
    try:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        with staged(
            directory,
            store=options.store,
            seed=options.seed,
            producers=options.producers,
            readers=options.readers,
            rate=options.rate,
            probabilities="" if options.proxy == "none" else options.proxy,
        ) as stage:
            if stage.server is not None:
                os.environ.update(stage.server.environment())
            outcome = _play(stage, options, lambda text: console.print(_stamp(started) + text))
        outcome.left += [] if options.store == "file" else _remnants(directory)
        outcome.wall_s = time.monotonic() - started
        outcome.faults += [f"left behind: {what}" for what in outcome.left]
        held = not outcome.faults
        _report(options, stage, outcome, console)
    finally:
        if options.keep or not (held or sys.exc_info()[0] is KeyboardInterrupt):
            console.print(f"journals and logs are kept in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return 0 if held else 1


def _play(stage: Stage, options: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    limit_s = (
        options.minutes * 60 if options.minutes else 60 + options.kills * max(_KILL_LIMIT_S, options.every)
    )
    said_at = began

    def over() -> bool:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at > 30:
            said_at = now
            say(f"{stage.kills()} kills of {dict(stage.blows)}")
        enough = not options.minutes and stage.kills() >= options.kills
        return enough or now - began > limit_s

    say(f"seed {options.seed}, {stage.lake}, in {stage.directory}")
    torment(stage, random.Random(options.seed), over=over, every_s=options.every)
    outcome.tormented_s = time.monotonic() - began
    if not options.minutes and stage.kills() < options.kills:
        stage.faults.append(f"only {stage.kills()} of {options.kills} kills in {limit_s:.0f} s")
    say(f"{stage.kills()} kills done; faults stop, everything comes to rest")
    total = _settle(stage)
    say(f"{total} steps; auditing")
    outcome.audit = audit_journals(stage, total)
    environment = dict(stage.actors[0].environment)
    _unmount(stage, environment, outcome)  # first: nothing of a mount may stay in the lake either
    audit_lake(stage, outcome.audit, environment)
    if not stage.of("mount") or stage.server is None:
        outcome.left += _remnants(stage.directory)
    outcome.faults += [*stage.faults, *(fault for actor in stage.actors for fault in actor.faults)]
    outcome.faults += outcome.audit.faults
    return outcome


def _settle(stage: Stage) -> int:
    """No more blows: zombies meet their successors, producers finish, readers read to the end. Returns all steps."""
    if stage.server is not None:
        stage.server.be_honest()
    stage.tend_until(
        "waking what was frozen", lambda: all(actor.frozen is None for actor in stage.actors), _SETTLE_S
    )
    stage.stop.touch()
    _finish(stage, "producer")
    environment = stage.actors[0].environment
    total = int(json.loads(stepfs(environment, "status", stage.lake, "--json").stdout)["frontier"]) + 1
    draft = stage.end.with_suffix(".draft")
    draft.write_text(str(total))
    draft.replace(stage.end)
    _finish(stage, "reader")
    _finish(stage, "sampler")
    for reclaimer in stage.of("reclaimer"):
        reclaimer.end()
    return total


def _finish(stage: Stage, kind: str) -> None:
    actors = stage.of(kind)
    if not stage.tend_until(
        f"the end of the {kind}s", lambda: not any(actor.wanted for actor in actors), _SETTLE_S
    ):
        stage.faults += [f"{actor.name} says: {actor.last_words()}" for actor in actors if actor.wanted]


def _unmount(stage: Stage, environment: dict[str, str], outcome: Outcome) -> None:
    for actor, directory in zip(stage.of("mount"), stage.mounts(), strict=True):
        actor.wanted = False
        done = run_stepfs(environment, "unmount", str(directory))
        if done.returncode != 0:
            outcome.faults.append(
                f"unmount {directory.name}: exit code {done.returncode}: {done.stderr.strip()}"
            )
        elif actor.process is not None and actor.process.wait(60) != 0:
            outcome.faults.append(f"{actor.name} ended with exit code {actor.process.returncode}")
    if stage.cache.exists() and any(stage.cache.iterdir()):
        outcome.left.append(f"cache {[path.name for path in stage.cache.rglob('*')][:5]}")


def _remnants(directory: Path) -> list[str]:
    mounted = [str(path) for path in (directory / "mnt").glob("*") if is_mounted(path)]
    return [*mounted, *processes_naming(directory)]


def _report(options: argparse.Namespace, stage: Stage, outcome: Outcome, console: Console) -> None:
    audit = outcome.audit
    proxied = {}
    if stage.server is not None and stage.server.counts.exists():
        proxied = json.loads(stage.server.counts.read_text())
    endings: dict[str, dict[str, int]] = {actor.name: dict(actor.endings) for actor in stage.actors}
    figures = {
        "seed": options.seed,
        "store": options.store,
        "held": not outcome.faults,
        "kills": {kind: stage.blows[kind] for kind in (*COUNTED, "reader", "sampler")},
        "frozen": {kind: stage.blows[f"frozen {kind}"] for kind in ("producer", "reclaimer", "mount")},
        "fenced_zombies": sum(actor.zombies_fenced for actor in stage.actors),
        "steps": audit.steps,
        "records": audit.records,
        "readings": audit.readings,
        "lost": audit.lost,
        "duplicated": audit.duplicated,
        "torn": audit.torn,
        "disordered": audit.disordered,
        "readers_differ": audit.differing,
        "live_steps_after_reclaim": audit.live,
        "probe_objects_left": audit.probes,
        "sampled": dict(_sampled(stage)),
        "attempts": dict(audit.tally),
        "proxy": proxied,
        "endings": endings,
        "tormented_s": round(outcome.tormented_s, 1),
        "wall_s": round(outcome.wall_s, 1),
        "faults": outcome.faults,
    }
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        print_table(figures)
    for fault in outcome.faults[:_SHOWN_MAX]:
        console.print(f"[red]fault:[/red] {fault}", markup=True, soft_wrap=True)
    console.print(f"the same kinds of blows in the same order: {_again(options)}", soft_wrap=True)


def _sampled(stage: Stage) -> Counter[str]:
    """How often the samplers read in which way: the sum over the last note of each incarnation."""
    last: dict[tuple[str, int], dict[str, int]] = {}
    for actor in stage.of("sampler"):
        assert actor.journal is not None
        last |= {
            (actor.name, note["pid"]): note["sampled"] for note in notes(actor.journal) if "sampled" in note
        }
    return sum(map(Counter, last.values()), Counter())


def _again(options: argparse.Namespace) -> str:
    length = f"--minutes {options.minutes:g}" if options.minutes else f"--kills {options.kills}"
    proxy = "" if options.proxy == PROXY or options.store == "file" else f" --proxy '{options.proxy}'"
    return (
        f"scripts/torture {length} --seed {options.seed} --producers {options.producers} --readers {options.readers}"
        f" --store {options.store} --rate {options.rate:g} --every {options.every:g}{proxy}"
    )


def _stamp(started: float) -> str:
    return f"{time.monotonic() - started:6.1f} s  "


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    """Once: what is cleaned up after it must not be interrupted again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--kills", type=int, default=40, help="of producers, mounts, reclaimers, server (default 40)"
    )
    length.add_argument("--minutes", type=float, help="go on for so long instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument(
        "--readers", type=int, default=2, help="mounts, each with a reading process (default 2)"
    )
    parser.add_argument("--rate", type=float, default=4.0, help="records per second and producer (default 4)")
    parser.add_argument("--every", type=float, default=2.5, help="mean seconds between blows (default 2.5)")
    parser.add_argument("--store", choices=["s3", "file"], default="s3")
    parser.add_argument("--proxy", default=PROXY, help="troubles with probabilities, or 'none' (s3 only)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--keep", action="store_true", help="keep journals, logs and the lake")
    options = parser.parse_args()
    if min(options.kills, options.producers, options.readers) < 1 or min(options.rate, options.every) <= 0:
        parser.error("--kills, --producers and --readers start at 1; --rate and --every are above 0")
    if options.proxy != "none":
        try:
            parse_probabilities(options.proxy)
        except ValueError as error:
            parser.error(f"--proxy: {error}")
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("torture: interrupted; everything it started is stopped and removed", file=sys.stderr)
        sys.exit(130)
