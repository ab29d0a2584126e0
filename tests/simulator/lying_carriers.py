"""Writers whose commits carry the truth, a part of it, nothing as an old writer's, or lies."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from stepfs.format.commit import Commit, chain_digest, decode_commit, encode_commit
from stepfs.lake.log.carriers import Newest

TRUTHS: Final = 4  # for each lie


@contextmanager
def lying_carriers(seed: int) -> Iterator[Counter[str]]:
    """Within, all writers are such; counts what they say."""
    right, liar = Newest.carried_by, Liar(random.Random(seed))

    def told(newest: Newest, commit: Commit) -> Commit:
        return liar.of(right(newest, commit))

    Newest.carried_by = told  # type: ignore[method-assign, assignment]
    try:
        yield liar.said
    finally:
        Newest.carried_by = right  # type: ignore[method-assign]


def forged(truth: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Valid commits that tell other positions, and chain to each other."""
    found, digest = list[bytes](), None
    for body in truth:
        commit = decode_commit(body, "x")
        commit = replace(commit, position=b"\x01", prev_digest=digest or commit.prev_digest, carried=())
        found.append(encode_commit(commit))
        digest = chain_digest(commit.prev_digest, found[-1])
    return tuple(found)


def bent(truth: tuple[bytes, ...], rng: random.Random) -> tuple[bytes, ...]:
    place = rng.randrange(len(truth))
    body = bytearray(truth[place])
    body[rng.randrange(len(body))] ^= 1
    return (*truth[:place], bytes(body), *truth[place + 1 :])


class Liar:
    """Decides for each commit."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.said: Counter[str] = Counter()

    def of(self, commit: Commit) -> Commit:
        truth, rng = commit.carried, self._rng
        if not truth:
            return commit
        says: dict[str, Callable[[], tuple[bytes, ...]]] = {
            "part": lambda: truth[rng.randrange(len(truth)) :],
            "nothing": lambda: (),
            "garbage": lambda: tuple(rng.randbytes(len(body)) for body in truth),
            "swapped": lambda: tuple(reversed(truth)),
            "short": lambda: truth[:-1],
            "bent": lambda: bent(truth, rng),
            "forged": lambda: forged(truth),
        }
        what = rng.choice([*says, *["truth"] * TRUTHS])
        self.said[what] += 1
        return replace(commit, carried=says[what]() if what in says else truth)
