"""A numbered create-if-absent sequence: the one structure behind the log and the control records.

Slots are taken one by one, each by a single conditional create of bytes that carry a random id. So a writer whose
create had no clear reply (a lost reply, a 409, a 500 for the loser of a race) reads the slot: equal bytes are its own
(hazard 2). Nothing is ever overwritten and nothing is deleted here.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio

from stepfs._internal import entropy
from stepfs.errors import StoreUnreachableError
from stepfs.format.keys import number_of, numbered
from stepfs.store.api import Entry, Put, Store

_ROUNDS_MAX: Final = 8
_RETRY_S: Final = (0.02, 0.1)
_LIST_PAGE: Final = 1000
STRAY_GAP: Final = 1000  # a dense sequence has lost at most so many objects in a row: what lies beyond is none of it


@dataclass(frozen=True, slots=True)
class Mine:
    """The slot holds my bytes. Whether the slot may be occupied at all is the caller's floor check."""


@dataclass(frozen=True, slots=True)
class SlotLost:
    """The slot holds another writer's bytes (`taken`), or was taken and deleted since (`taken` False: reopen)."""

    taken: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """The store does not answer. These bytes may be in the slot, or may still arrive there: resolve this first."""

    key: str
    body: bytes
    why: str = ""  # the last error, in parentheses


SlotOutcome = Mine | SlotLost | Unknown


async def take_slot(
    store: Store, key: str, body: bytes, look: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint
) -> SlotOutcome:
    """Create `key` with `body`, resolving every ambiguity by reading the slot.

    The same bytes are sent to the same slot again only if a read showed the slot absent after an ambiguous attempt, or
    if the server asked for a retry; and after a `look`, which raises if the store was rolled back meanwhile. Bounded: after
    `_ROUNDS_MAX` undecided rounds the outcome is Unknown.
    """
    for round_number in range(_ROUNDS_MAX):
        if round_number:
            low, high = _RETRY_S
            await trio.sleep(entropy.uniform(low, high) * 2 ** min(round_number, 5))
        try:
            if round_number:
                await look()
            put = await store.create(key, body)
            if put is Put.CREATED:
                return Mine()
            if put is Put.RETRY:
                continue
            found = await store.get(key)
        except StoreUnreachableError as error:
            return Unknown(key, body, f" ({error})")
        if found == body:
            return Mine()
        if found is not None:
            return SlotLost(taken=True)
        if put is Put.EXISTS:
            return SlotLost(taken=False)
    return Unknown(key, body)


def settled(outcome: SlotOutcome, store: Store, advice: str) -> Mine | SlotLost:
    """The outcome, if it is known; else `StoreUnreachableError` with the store's last error and the advice."""
    if isinstance(outcome, Unknown):
        raise StoreUnreachableError(f"{store.url}: the store stopped answering{outcome.why}; {advice}")
    return outcome


async def create_own(store: Store, key: str, body: bytes, advice: str) -> None:
    """Create an object whose key no other process writes, because it carries this writer's random id.

    If the store reports such a key as taken and then shows no object, the create is repeated. `StoreUnreachableError`,
    with `advice`, unless the object exists in the end: the next objects may name it.
    """
    for _ in range(_ROUNDS_MAX):
        outcome = settled(await take_slot(store, key, body), store, advice)
        if isinstance(outcome, Mine):
            return
        if outcome.taken:
            break
    raise StoreUnreachableError(
        f"{store.url}: the store calls {key} taken and does not show what was written; {advice}"
    )


async def last_number(store: Store, prefix: str, *, after: int = -1) -> int | None:
    """The greatest number above `after` under `prefix`, None if there is none: one LIST for up to 1000 slots, then
    galloping and bisection, so the cost is logarithmic in the number of slots.
    """
    low = await _greatest_after(store, prefix, after)
    if low is None:
        return None
    number, full = low
    stride = _LIST_PAGE
    while full:
        step = await _greatest_after(store, prefix, number + stride)
        if step is not None:
            (number, full), stride = step, stride * 2
        elif stride > _LIST_PAGE:
            stride = max(_LIST_PAGE, stride // 4)
        else:
            following = await _greatest_after(store, prefix, number)
            if following is None:
                break
            number, full = following
    return number


async def listed_slots(
    store: Store, prefix: str, *, after: int = -1, ages: bool = False, limit: int | None = None
) -> dict[int, Entry]:
    """The slots above number `after`, rising, as LIST shows them; other objects under `prefix` are left out."""
    behind = numbered(prefix, after) if after >= 0 else prefix
    page = await store.list(prefix, after=behind, ages=ages, limit=limit)
    return {number: entry for entry in page if (number := number_of(prefix, entry.key)) is not None}


async def _greatest_after(store: Store, prefix: str, number: int) -> tuple[int, bool] | None:
    """Greatest number on the one page that follows `number`, and whether that page was full."""
    after = numbered(prefix, number) if number >= 0 else prefix
    page = await store.list(prefix, after=after, limit=_LIST_PAGE)
    numbers = [n for entry in page if (n := number_of(prefix, entry.key)) is not None]
    return (numbers[-1], len(page) == _LIST_PAGE) if numbers else None


async def last_dense_number(known: int, exists: Callable[[int], Awaitable[bool]]) -> int:
    """Greatest occupied slot of a dense, never trimmed sequence, given that `known` is occupied (or -1).

    Doubling and bisection over `exists`; exactly one call when nothing is new.
    """
    stride = 1
    low = known
    while await exists(low + stride):
        low += stride
        stride *= 2
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if await exists(middle):
            low = middle
        else:
            high = middle
    return low
