"""The proxy of a torture run: the tests' fault proxy at random, until SIGUSR1 tells it to be honest.

Keeps a file of counts up to date: how many requests met which trouble, and how many creates of log versions were
ambiguous (applied, or yet to be, while the client was told nothing or something else).
"""

from __future__ import annotations

import argparse
import json
import signal
from collections import Counter
from functools import partial
from pathlib import Path

import trio
from certificates import Certificate
from faultproxy import CONFLICT_409, KNOWN, FaultProxy, Trouble, delayed
from httpframes import Message

LATE = delayed(2.0)
SLOW = Trouble("slow", delay_s=1.0)
TROUBLES = {**{trouble.name: trouble for trouble in KNOWN}, "late": LATE, "slow": SLOW}
_AMBIGUOUS = {"lost response", "reset after", "500 after apply", LATE.name}
_COUNT_EVERY_S = 0.5
_THROWS = 5  # of the dice for each conditional create


class PlausibleProxy(FaultProxy):
    """Conditional creates, on which everything rests, are the most unlucky; nothing else is ever answered 409."""

    def _pick(self, request: Message) -> Trouble | None:
        if not {"if-none-match", "x-goog-if-generation-match"}.isdisjoint(request.headers):
            throws = [super(PlausibleProxy, self)._pick(request) for _ in range(_THROWS)]
            return next(filter(None, throws), None)
        trouble = super()._pick(request)
        return None if trouble is CONFLICT_409 else trouble


def parse_probabilities(text: str) -> dict[str, float]:
    """'lost response=0.01,late=0.001' → by name. ValueError names what is wrong."""
    found = {}
    for pair in filter(None, text.split(",")):
        name, _, share = pair.rpartition("=")
        if name.strip() not in TROUBLES:
            raise ValueError(f"{name.strip()!r} is not one of {', '.join(TROUBLES)}")
        found[name.strip()] = float(share)
    if not (all(share >= 0 for share in found.values()) and sum(found.values()) < 1):
        raise ValueError("probabilities lie between 0 and 1, together too")
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("upstream_port", type=int)
    parser.add_argument("counts", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probabilities", default="")
    parser.add_argument("--certificate", type=Path, nargs=2, metavar=("PUBLIC", "PRIVATE"))
    options = parser.parse_args()
    certificate = options.certificate and Certificate(*options.certificate)
    proxy = PlausibleProxy(options.upstream_port, seed=options.seed, certificate=certificate)
    proxy.randomly({TROUBLES[name]: share for name, share in parse_probabilities(options.probabilities).items()})
    counts: Counter[str] = Counter()
    with trio.open_signal_receiver(signal.SIGUSR1) as honest:
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(proxy.serve, port=options.port))
            nursery.start_soon(_keep_counts, proxy, counts, options.counts)
            print(proxy.endpoint_url, flush=True)
            async for _ in honest:
                proxy.randomly({})


async def _keep_counts(proxy: FaultProxy, counts: Counter[str], path: Path) -> None:
    while True:
        handled, proxy.handled = proxy.handled, []
        for request in handled:
            counts["requests"] += 1
            if request.trouble:
                counts[request.trouble] += 1
                if request.method == "PUT" and "/log/" in request.path and request.trouble in _AMBIGUOUS:
                    counts["ambiguous creates"] += 1
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(counts))
        draft.replace(path)
        await trio.sleep(_COUNT_EVERY_S)


if __name__ == "__main__":
    trio.run(main)
