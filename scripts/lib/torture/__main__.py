"""The command behind scripts/torture: real processes on a real store, killed at random, then every byte audited."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.machine import is_mounted
from quickstart.programs import processes_naming
from torture.audit import Audit, audit_journals, audit_lake
from torture.planned import run as planned
from torture.proxy import parse_probabilities
from torture.records import notes
from torture.run import COUNTED, Run, inject_faults, prepared_run, run_stepfs, stepfs
from torture.session import Session, session
from torture.table import print_table

PROXY = (
    "reset before=0.003,reset after=0.004,500 after apply=0.003,500=0.002,lost response=0.0004,lost request=0.0004,"
    "409=0.01,503=0.004,short body=0.003,late=0.001,slow=0.01"
)
_KILL_LIMIT_S = 12.0  # of wall clock per kill before a run gives up
_SETTLE_S = 600.0  # each phase of coming to rest, on a machine with other work to do


@dataclass
class Outcome:
    """What a run came to."""

    audit: Audit = field(default_factory=Audit)
    faults: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    under_faults_s: float = 0.0
    wall_s: float = 0.0


def main() -> int:
    if "--plan" in sys.argv[1:]:
        return planned.main([word for word in sys.argv[1:] if word != "--plan"])
    options = _parse()
    started = time.monotonic()
    with session(options, "stepfs-torture-", "AWS_") as found:
        with prepared_run(
            found.directory, store=options.store, seed=options.seed, producers=options.producers,
            readers=options.readers, rate=options.rate,
            probabilities="" if options.proxy == "none" else options.proxy,
        ) as run:  # fmt: skip
            if run.server is not None:
                os.environ.update(run.server.environment())
            outcome = _run_and_audit(run, options, lambda text: found.console.print(_stamp(started) + text))
        outcome.left += [] if options.store == "file" else _remnants(found.directory)
        outcome.wall_s = time.monotonic() - started
        outcome.faults += [f"left behind: {what}" for what in outcome.left]
        found.held = not outcome.faults
        _report(found, run, outcome)
    return 0 if found.held else 1


def _run_and_audit(run: Run, options: argparse.Namespace, say: Callable[[str], None]) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    limit_s = options.minutes * 60 if options.minutes else 60 + options.kills * max(_KILL_LIMIT_S, options.every)
    said_at = began

    def over() -> bool:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at > 30:
            said_at = now
            say(f"{run.kills()} kills of {dict(run.injected)}")
        enough = not options.minutes and run.kills() >= options.kills
        return bool(enough or now - began > limit_s)

    say(f"seed {options.seed}, {run.lake}, in {run.directory}")
    inject_faults(run, random.Random(options.seed), over=over, every_s=options.every)
    outcome.under_faults_s = time.monotonic() - began
    if not options.minutes and run.kills() < options.kills:
        run.faults.append(f"only {run.kills()} of {options.kills} kills in {limit_s:.0f} s")
    say(f"{run.kills()} kills done; faults stop, everything comes to rest")
    total = _settle(run)
    say(f"{total} steps; auditing")
    outcome.audit = audit_journals(run, total)
    environment = dict(run.actors[0].environment)
    _unmount(run, environment, outcome)  # first: nothing of a mount may stay in the lake either
    audit_lake(run, outcome.audit, environment)
    if not run.of("mount") or run.server is None:
        outcome.left += _remnants(run.directory)
    outcome.faults += [*run.faults, *(fault for actor in run.actors for fault in actor.faults)]
    outcome.faults += outcome.audit.faults
    return outcome


def _settle(run: Run) -> int:
    """No more faults: zombies meet their successors, producers finish, readers read to the end. Returns all steps."""
    if run.server is not None:
        run.server.be_honest()
    run.tend_until("waking what was frozen", lambda: all(actor.frozen is None for actor in run.actors), _SETTLE_S)
    run.tend_until("handing mounts over", lambda: not any(actor.replaced for actor in run.actors), _SETTLE_S)
    run.stop.touch()
    _finish(run, "producer")
    environment = run.actors[0].environment
    total = int(json.loads(stepfs(environment, "status", run.lake, "--json").stdout)["frontier"]) + 1
    draft = run.end.with_suffix(".draft")
    draft.write_text(str(total))
    draft.replace(run.end)
    _finish(run, "reader")
    _finish(run, "sampler")
    for reclaimer in run.of("reclaimer"):
        reclaimer.end()
    return total


def _finish(run: Run, kind: str) -> None:
    actors = run.of(kind)
    if not run.tend_until(f"the end of the {kind}s", lambda: not any(actor.wanted for actor in actors), _SETTLE_S):
        run.faults += [f"{actor.name} says: {actor.last_words()}" for actor in actors if actor.wanted]


def _unmount(run: Run, environment: dict[str, str], outcome: Outcome) -> None:
    for actor, directory in zip(run.of("mount"), run.mounts(), strict=True):
        actor.wanted = False
        done = run_stepfs(environment, "unmount", str(directory))
        if done.returncode != 0:
            outcome.faults.append(f"unmount {directory.name}: exit code {done.returncode}: {done.stderr.strip()}")
        elif actor.process is not None and actor.process.wait(60) != 0:
            outcome.faults.append(f"{actor.name} ended with exit code {actor.process.returncode}")
    if run.cache.exists() and any(run.cache.iterdir()):
        outcome.left.append(f"cache {[path.name for path in run.cache.rglob('*')][:5]}")


def _remnants(directory: Path) -> list[str]:
    mounted = [str(path) for path in (directory / "mnt").glob("*") if is_mounted(path)]
    return [*mounted, *processes_naming(directory)]


def _report(found: Session, run: Run, outcome: Outcome) -> None:
    options, audit = found.options, outcome.audit
    proxied = {}
    if run.server is not None and run.server.counts.exists():
        proxied = json.loads(run.server.counts.read_text())
    endings: dict[str, dict[str, int]] = {actor.name: dict(actor.endings) for actor in run.actors}
    figures = {
        "seed": options.seed,
        "store": options.store,
        "held": not outcome.faults,
        "kills": {kind: run.injected[kind] for kind in (*COUNTED, "reader", "sampler")},
        "frozen": {kind: run.injected[f"frozen {kind}"] for kind in ("producer", "reclaimer", "mount")},
        "replaced_mounts": [run.injected["replaced mount"], sum(a.endings["handed over"] for a in run.actors)],
        "fenced_zombies": sum(actor.zombies_fenced for actor in run.actors),
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
        "sampled": dict(_sampled(run)),
        "attempts": dict(audit.tally),
        "proxy": proxied,
        "endings": endings,
        "tormented_s": round(outcome.under_faults_s, 1),
        "wall_s": round(outcome.wall_s, 1),
        "faults": outcome.faults,
    }
    found.report(figures, outcome.faults, print_table)
    found.console.print(f"the same kinds of faults in the same order: {_again(options)}", soft_wrap=True)


def _sampled(run: Run) -> Counter[str]:
    """How often the samplers read in which way: the sum over the last note of each incarnation."""
    last: dict[tuple[str, int], dict[str, int]] = {}
    for actor in run.of("sampler"):
        assert actor.journal is not None
        last |= {(actor.name, note["pid"]): note["sampled"] for note in notes(actor.journal) if "sampled" in note}
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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--kills", type=int, default=40, help="of producers, mounts, reclaimers, server (default 40)")
    length.add_argument("--minutes", type=float, help="go on for so long instead")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--producers", type=int, default=3)
    parser.add_argument("--readers", type=int, default=2, help="mounts, each with a reading process (default 2)")
    parser.add_argument("--rate", type=float, default=4.0, help="records per second and producer (default 4)")
    parser.add_argument("--every", type=float, default=2.5, help="mean seconds between faults (default 2.5)")
    parser.add_argument("--store", choices=["s3", "gs", "az", "file"], default="s3")
    parser.add_argument("--proxy", default=PROXY, help="troubles with probabilities, or 'none' (not for file)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--keep", action="store_true", help="keep journals, logs and the lake")
    parser.add_argument("--plan", action="store_true", help="planned runs in place of these; see --plan --help")
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
