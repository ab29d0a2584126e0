"""A test of the one guarantee that stepfs needs of a store: of many creates of a key exactly one succeeds.

Some servers ignore If-None-Match, others check without a lock, which only a race reveals (hazard 4). Probe objects live
under `probe/`, outside every lake id; a role without the right to delete leaves them there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs.store.api import Put, Store

PREFIX: Final = "probe/"
_RACES: Final = 4
_RACERS: Final = 4
_UNDECIDED_MAX: Final = 3
_DELETES: Final = 3  # each attempt of a put that the client made again may be carried out late, and undo one
_PAUSE_S: Final = 0.5
_SERVERS: Final = {  # Server header of unfit servers → their usual name
    "AmazonS3": "probably `rclone serve s3` or another gofakes3 server",
    "MinIO": "probably the JuiceFS gateway or an old MinIO",
}

# Name, the look (its result is the wrong behaviour, '' for none), and the keys that it may leave under a prefix.
_Examination = tuple[str, Callable[[Store, str], Awaitable[str]], Callable[[str], list[str]]]


@dataclass(frozen=True, slots=True)
class Check:
    """One capability: `passed`, or in `seen` the wrong behaviour."""

    name: str
    passed: bool
    seen: str = ""


@dataclass(slots=True)
class StoreReport:
    """The result of `examine_store`; `server` is the server's own name for itself, '' if it gives none."""

    url: str
    server: str = ""
    checks: list[Check] = field(default_factory=list)

    @property
    def fit(self) -> bool:
        return all(check.passed for check in self.checks)

    def refusal(self) -> str:
        """One line that names the server and its faults; '' if it is fit."""
        wrong = [f"{check.name}: {check.seen}" for check in self.checks if not check.passed]
        if not wrong:
            return ""
        called = f"the server ({self.server}{_alias(self.server)})" if self.server else "the store"
        return f"{self.url}: {called} cannot hold a lake: {'; '.join(wrong)}; use one that honours conditional writes"


async def probe_store(store: Store, *, thorough: bool) -> None:
    """`RefusedError` naming the server unless conditional creates are honest.

    Brief: two creates, a read, a delete, one after the other. Thorough: `examine_store`. `StoreUnreachableError` if
    the server does not decide a create.
    """
    report = await _examine(store, _EXAMINATIONS if thorough else _EXAMINATIONS[:1])
    if not report.fit:
        raise RefusedError(report.refusal())


async def keeps_versions(store: Store) -> bool:
    """Whether only a lifecycle rule of the bucket frees space: advice, so no verb of `Store`; False for one that cannot say."""
    ask = getattr(store, "keeps_versions", None)
    return ask is not None and bool(await ask())


async def examine_store(store: Store) -> StoreReport:
    """Try every capability that stepfs needs; only an unreachable or closed store raises."""
    return await _examine(store, _EXAMINATIONS)


async def _examine(store: Store, examinations: Sequence[_Examination]) -> StoreReport:
    report = StoreReport(store.url)
    for name, look, keys in examinations:
        prefix = f"{PREFIX}{entropy.token(16).hex()}"
        try:
            seen = await look(store, prefix)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 10.0), suppress(StepfsError):
                await store.delete(keys(prefix))  # the look's result matters more
        report.checks.append(Check(name, not seen, seen))
        if seen:
            break  # further looks would only repeat it
    report.server = str(getattr(store, "server", ""))
    return report


async def _second_create(store: Store, prefix: str) -> str:
    first = await _decided(store, prefix, b"first")
    second = await _decided(store, prefix, b"second")
    if first is Put.CREATED and second is Put.CREATED:
        return "the condition is ignored, a second create of the same key succeeded"
    if second is not Put.EXISTS:
        return f"two creates of one key ended as {first.value}, {second.value}"
    body = await store.get(prefix)
    # Our first create may have succeeded without a reply.
    kept = body == b"first" or (first is Put.EXISTS and body is not None)
    return "" if kept else "a refused create changed the object"


async def _racing_creates(store: Store, prefix: str) -> str:
    outcomes = await _race(store, _race_keys(prefix))
    for key, ended in outcomes.items():
        winners = [body for body, outcome in ended.items() if outcome is Put.CREATED]
        unsure = {Put.UNKNOWN, Put.RETRY} & set(ended.values())
        if len(winners) > 1:
            return f"{len(winners)} of {_RACERS} racing creates of one key succeeded"
        if winners and await store.get(key) != winners[0]:
            return "the object is not the winner's"
        if not winners and not unsure:
            return "no one of racing creates succeeded"
    return ""


async def _race(store: Store, keys: Sequence[str]) -> dict[str, dict[bytes, Put]]:
    """Run all races at once: losers wait seconds on some servers."""
    outcomes: dict[str, dict[bytes, Put]] = {key: {} for key in keys}
    failed: list[StepfsError] = []

    async def enter(key: str, body: bytes) -> None:
        try:
            outcomes[key][body] = await store.create(key, body)
        except StepfsError as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        for key in keys:
            for racer in range(_RACERS):
                nursery.start_soon(enter, key, b"racer %d" % racer)
    for error in failed[:1]:
        raise error
    return outcomes


async def _reading(store: Store, prefix: str) -> str:
    if await store.get(prefix) is not None:
        return "an object that was never written is there"
    body = bytes(range(256)) * 256
    await store.put(prefix, [body])
    if await store.get(prefix) != body:
        return "an object just written does not read back"
    middle = bytearray(1000)
    if await store.read_into(prefix, 12345, memoryview(middle)) != 1000 or middle != body[12345:13345]:
        return "a ranged read returns other bytes"
    for _ in range(_DELETES):
        await store.delete([prefix])
        if await store.get(prefix) is None:
            return ""
    return "a deleted object is still there"


async def _listing(store: Store, prefix: str) -> str:
    keys = _list_keys(prefix)
    for key in reversed(keys):
        await store.put(key, [b"x"])
    if [entry.key for entry in await store.list(f"{prefix}-list/")] != keys:
        return "objects just written are not listed, or not in order"
    some = await store.list(f"{prefix}-list/", after=keys[1], limit=2)
    right = [entry.key for entry in some] == keys[2:4]
    return "" if right else "listing does not start or stop where it was told to"


def _one_key(prefix: str) -> list[str]:
    return [prefix]


def _race_keys(prefix: str) -> list[str]:
    return [f"{prefix}-{race}" for race in range(_RACES)]


def _list_keys(prefix: str) -> list[str]:
    return [f"{prefix}-list/{number:03}" for number in range(5)]


async def _decided(store: Store, key: str, body: bytes) -> Put:
    for _ in range(_UNDECIDED_MAX):
        outcome = await store.create(key, body)
        if outcome in {Put.CREATED, Put.EXISTS}:
            return outcome
        await trio.sleep(_PAUSE_S)
    raise StoreUnreachableError(f"{store.url}: the server does not decide a create; try again later")


def _alias(server: str) -> str:
    known = [name for sign, name in _SERVERS.items() if server.startswith(sign)]
    return f", {known[0]}" if known else ""


_EXAMINATIONS: Final[tuple[_Examination, ...]] = (
    ("conditional create", _second_create, _one_key),
    ("racing creates", _racing_creates, _race_keys),
    ("read after write", _reading, _one_key),
    ("list after write", _listing, _list_keys),
)
