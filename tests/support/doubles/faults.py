"""The faults of one request, as values: whether and when the server applies it, and the answer for the caller.

The two are independent; every hazard of COMMIT.md that comes from the network is a pair of them. A `Plan` picks a
fault for each request; `faulty_store.FaultyStore` carries it out. Nothing here depends on time or global randomness.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 15.0


class Told(enum.Enum):
    """The caller's answer to a request."""

    TRUTH = "truth"
    NOTHING = "nothing"  # timeout, reset, 5xx, short body
    CONFLICT = "409"
    TAKEN = "412"
    ABSENT = "404"


@dataclass(frozen=True, slots=True)
class Fault:
    """One way for a request to go wrong.

    `applied`: the server carries it out on arrival. `late_s`: the server does so this long after arrival instead, when
    the caller has long given up. `wait_s`: the caller's wait beyond the usual latency. `half`: a batch delete removes
    only some keys. `stale_s`: a LIST shows the state of this long ago.
    """

    name: str
    told: Told
    applied: bool = False
    late_s: float | None = None
    wait_s: float = 0.0
    half: bool = False
    stale_s: float = 0.0


LOST_REQUEST = Fault("lost request", Told.NOTHING, wait_s=_TIMEOUT_S)
LOST_RESPONSE = Fault("lost response", Told.NOTHING, applied=True, wait_s=_TIMEOUT_S)
RESET_BEFORE = Fault("reset before apply", Told.NOTHING)
RESET_AFTER = Fault("reset after apply", Told.NOTHING, applied=True)
ERROR_500 = Fault("500", Told.NOTHING)
ERROR_500_APPLIED = Fault("500 after apply", Told.NOTHING, applied=True)
THROTTLED_503 = Fault("503", Told.NOTHING, wait_s=0.1)
CONFLICT_409 = Fault("409", Told.CONFLICT)
FALSE_412 = Fault("412 for a free key", Told.TAKEN)
OWN_412 = Fault("412 for the own success", Told.TAKEN, applied=True)
SHORT_BODY = Fault("short body", Told.NOTHING, applied=True)
PROXY_404 = Fault("404 of a proxy", Told.NOTHING)  # not the store's own answer: the S3 store ignores it, too
HALF_DELETED = Fault("half a delete", Told.NOTHING, applied=True, half=True)
STALE_404 = Fault("404 for an object that is there", Told.ABSENT)


def delayed(late_s: float, *, wait_s: float = 0.0) -> Fault:
    """The caller gets no reply, and the request is applied `late_s` after its arrival nevertheless."""
    return Fault(f"delayed {late_s:g} s", Told.NOTHING, late_s=late_s, wait_s=wait_s)


def stale_list(lag_s: float) -> Fault:
    """A LIST that lags: objects created since are missing, objects deleted since are shown."""
    return Fault(f"a LIST {lag_s:g} s old", Told.TRUTH, applied=True, stale_s=lag_s)


Plan = Callable[[str, str, random.Random], Fault | None]  # (verb, key, the store's own randomness)


def no_faults(_verb: str, _key: str, _rng: random.Random) -> Fault | None:
    """Every request works."""
    return None


class Scripted:
    """The given faults, each once, on the first request with the given verb whose key contains the given text."""

    def __init__(self, script: Sequence[tuple[str, str, Fault]]) -> None:
        self.left = list(script)  # a test asserts that it ends empty

    def __call__(self, verb: str, key: str, _rng: random.Random) -> Fault | None:
        for position, (wanted, part, fault) in enumerate(self.left):
            if wanted == verb and part in key:
                del self.left[position]
                return fault
        return None


class Weighted:
    """Each fault with its probability, per request of a verb for which it can happen."""

    def __init__(self, probabilities: Mapping[Fault, float]) -> None:
        healthy = 1.0 - sum(probabilities.values())
        assert healthy >= 0.0
        self._picks: list[Fault | None] = [None, *probabilities]
        self._bounds = list(itertools.accumulate([healthy, *probabilities.values()]))
        self.active = True  # a simulation turns faults off to let everything settle

    def __call__(self, verb: str, _key: str, rng: random.Random) -> Fault | None:
        drawn = rng.random() * self._bounds[-1]
        pick = self._picks[bisect.bisect(self._bounds, drawn, 0, len(self._picks) - 1)]
        return pick if self.active and pick is not None and can_happen(pick, verb) else None


def can_happen(fault: Fault, verb: str) -> bool:
    """Whether `fault` makes sense for `verb`: status codes of conditional creates only for them, and so on."""
    if fault.told in {Told.CONFLICT, Told.TAKEN}:
        return verb == "create"
    if fault.told is Told.ABSENT or fault is SHORT_BODY:
        return verb == "get"
    if fault.stale_s:
        return verb == "list"
    return verb == "delete" or not fault.half
