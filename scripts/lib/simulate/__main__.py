"""The command behind scripts/simulate: sweep seeds into a table, or replay one."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter

from cluster import simulate
from draw import scenario
from sweep import sweep

_SHOWN_MAX = 20


def main() -> int:
    options = _parse()
    if options.seed is not None:
        return _replay(options.seed, trace=options.trace)
    started = time.monotonic()
    met: Counter[str] = Counter()
    failures = 0
    for outcome in sweep(range(options.first, options.first + options.seeds), processes=options.jobs):
        met.update(outcome.counts)
        met.update(seeds=1, requests=outcome.events, **{"virtual hours": round(outcome.virtual_s)})
        if outcome.broken:
            failures += 1
            if failures <= _SHOWN_MAX:
                print(f"seed {outcome.seed}: {outcome.broken[0]}")
                print(f"    replay it: scripts/simulate --seed {outcome.seed} --trace", flush=True)
        if sys.stderr.isatty() and met["seeds"] % 50 == 0:
            print(f"\r{met['seeds']} of {options.seeds}, {failures} broken", end="", file=sys.stderr)
    met["virtual hours"] //= 3600
    if sys.stderr.isatty():
        print(file=sys.stderr)
    _table(met, failures, time.monotonic() - started)
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one per core)")
    parser.add_argument("--seed", type=int, default=None, help="replay this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every request")
    options = parser.parse_args()
    if options.seeds < 1 or options.first < 0 or (options.jobs or 1) < 1:
        parser.error("--seeds and --jobs start at 1, --first at 0")
    if options.trace and options.seed is None:
        parser.error("--trace needs --seed")
    return options


def _replay(seed: int, *, trace: bool) -> int:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    outcome = simulate(seed)
    if trace:
        print(scenario(seed))
        for event in outcome.trace:
            keys = " ".join(key.split("/", 1)[-1] for key in event.keys)
            print(f"{event.time_us / 1e6:11.6f} {event.actor:9} {event.verb:6} {keys} → {event.outcome} {event.fault}")
    print(f"seed {seed}: {outcome.virtual_s:.0f} virtual s, {len(outcome.trace)} requests, trace {outcome.digest[:16]}")
    for broken in outcome.broken:
        print(f"broken: {broken}")
    return 1 if outcome.broken else 0


def _table(met: Counter[str], failures: int, wall_s: float) -> None:
    width = max(map(len, met))
    for what in sorted(met):
        print(f"{what:{width}} {met[what]:12,}")
    print(f"{'broken seeds':{width}} {failures:12,}")
    cores = len(os.sched_getaffinity(0))
    print(f"{met['seeds']} seeds in {wall_s:.0f} s, {wall_s / met['seeds'] * 1e3:.0f} ms each on {cores} cores")


if __name__ == "__main__":
    sys.exit(main())
