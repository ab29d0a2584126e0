"""`verify`, second half: every small object of a lake, also those that readers do not open today."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Final

from stepfs.errors import CorruptError, NewerFormatError, RefusedError, StepfsError, StoreUnreachableError
from stepfs.format.commit import chain_digest, decode_commit
from stepfs.format.control import decode_control
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Version
from stepfs.format.keys import control_prefix, extent, index_prefix, log_prefix, number_of, numbered, snapshot_prefix
from stepfs.format.snapshot import decode_segment, decode_snapshot
from stepfs.lake.concurrency import at_once, in_order, pages
from stepfs.lake.control import Control
from stepfs.lake.create_once import STRAY_GAP
from stepfs.lake.log.apply import read_versions
from stepfs.lake.verify.data import STRAY, Damage
from stepfs.store.api import Entry, Store

_UNREAD_MAX: Final = 3  # objects in a row; beyond that the store is at fault

Check = Callable[[str, bytes], str | None]  # (key, bytes) → the problem, if any


async def verify_metadata(store: Store, identity: LakeIdentity) -> list[Damage]:
    """Damage to all objects but data. Never raises `CorruptError`. `NewerFormatError`: a later version wrote some."""
    lake_id = identity.lake_id

    def of_lake(found: str) -> str | None:
        return None if found == lake_id else f"belongs to lake {found}"

    def snapshot(key: str, data: bytes) -> str | None:
        state = decode_snapshot(data, key)
        named = numbered(snapshot_prefix(lake_id), state.version)
        return of_lake(state.lake_id) or (None if named == key else f"holds version {state.version}")

    def segment(key: str, data: bytes) -> str | None:
        found, held = decode_segment(data, identity.slices, key)
        return of_lake(found) or (
            None if extent(index_prefix(lake_id), held.index) == key else f"holds segment {held.index}"
        )

    def control(key: str, data: bytes) -> str | None:
        with suppress(NewerFormatError):  # raised below if it is the newest; nobody reads the others any more
            return of_lake(decode_control(data, key)[0])
        return None

    checks: dict[str, Check] = {
        control_prefix(lake_id): control,
        snapshot_prefix(lake_id): snapshot,
        index_prefix(lake_id): segment,
    }
    damages: list[Damage] = []
    for prefix, check in checks.items():
        damages += [damage async for damage in _check_each(store, prefix, check)]
    damages = await _check_dense(store, control_prefix(lake_id), damages)
    return damages + await _check_log(store, identity)


async def _check_each(store: Store, prefix: str, check: Check) -> AsyncIterator[Damage]:
    async def problem_of(entry: Entry) -> str | StepfsError | None:
        try:
            data = await store.get(entry.key)
            return None if data is None else check(entry.key, data)  # None: reclaimed or trimmed since the LIST
        except CorruptError as error:
            return str(error).removeprefix(f"{entry.key}: ")
        except (RefusedError, StoreUnreachableError) as error:
            return error

    unread_in_a_row = 0
    async with aclosing(pages(store, prefix)) as found:
        async for page in found:
            number = at_once(max(entry.size for entry in page))
            async with aclosing(in_order(page, problem_of, number=number)) as problems:
                async for entry, problem in problems:
                    if isinstance(problem, NewerFormatError):
                        raise problem  # who does not know what is there can say nothing of damage
                    if isinstance(problem, StepfsError):
                        unread_in_a_row += 1
                        if unread_in_a_row > _UNREAD_MAX:
                            raise problem
                        yield _damage(entry.key, f"cannot be read: {problem}")
                        continue
                    unread_in_a_row = 0
                    if problem is not None:
                        yield _damage(entry.key, problem)


async def _check_dense(store: Store, prefix: str, damages: list[Damage]) -> list[Damage]:
    """`damages`, and the gaps: control records are never deleted. One that is damaged, and behind a gap that no loss makes,
    is none.
    """
    numbers = [n async for key in _keys(store, prefix) if (n := number_of(prefix, key)) is not None]
    damaged = {damage.key for damage in damages}
    strays = set()
    while len(numbers) > 1 and numbers[-1] - numbers[-2] > STRAY_GAP and numbered(prefix, numbers[-1]) in damaged:
        strays.add(numbered(prefix, numbers.pop()))
    found = [replace(damage, problem=STRAY) if damage.key in strays else damage for damage in damages]
    return found + _missing(prefix, 0, numbers)


def _missing(prefix: str, first: int, numbers: Iterable[int]) -> list[Damage]:
    """One damage a gap: a single object with a far number makes a gap of any size."""
    damages = []
    for number in numbers:
        if number > first:
            count = number - first
            more = "" if count == 1 else f", and {count - 1} more before {number}"
            damages.append(_damage(numbered(prefix, first), f"the object is missing{more}"))
        first = max(first, number + 1)
    return damages


async def _check_log(store: Store, identity: LakeIdentity) -> list[Damage]:
    control = Control(store, identity)
    try:
        await control.refresh()
        damages = await _check_commits(store, identity.lake_id, control)
        if damages:
            await control.refresh()
    except CorruptError:
        return []  # the newest control record is damaged, found above: the expected range of the log is unknown
    lowest = numbered(log_prefix(identity.lake_id), control.floor)
    return [damage for damage in damages if damage.key >= lowest]


async def _check_commits(store: Store, lake_id: str, control: Control) -> list[Damage]:
    prefix = log_prefix(lake_id)
    first = control.floor
    after = numbered(prefix, first - 1) if first > 0 else prefix
    listed = [n async for key in _keys(store, prefix, after) if (n := number_of(prefix, key)) is not None]
    damages = _missing(prefix, first, listed)
    chain = _Chain(lake_id, first)
    while listed:
        async with aclosing(read_versions(store, lake_id, [Version(n) for n in listed])) as bodies:
            async for key, body in bodies:
                damages += chain.check(key, body)
        unread = [n for n in listed if n >= chain.expected]
        if unread:  # the first of them was deleted since the LIST; it is no damage if a reclaimer did so
            damages.append(_damage(numbered(prefix, unread[0]), "the object is missing"))
            await control.refresh()
        listed = [n for n in unread[1:] if n >= control.floor]
    return damages


class _Chain:
    """Commits in order, each with the digest of the one before."""

    def __init__(self, lake_id: str, first: Version) -> None:
        self.expected = first  # version after the last one seen
        self._lake_id = lake_id
        self._digest: bytes | None = None  # of the commit before, if it was readable

    def check(self, key: str, body: bytes) -> list[Damage]:
        number = number_of(log_prefix(self._lake_id), key)
        assert number is not None
        before = self._digest if number == self.expected else None
        self.expected, self._digest = Version(number + 1), None
        try:
            commit = decode_commit(body, key)
        except CorruptError as error:
            return [_damage(key, str(error).removeprefix(f"{key}: "))]
        self._digest = chain_digest(commit.prev_digest, body)
        if (commit.lake_id, commit.version) != (self._lake_id, number):
            return [_damage(key, f"is version {commit.version} of lake {commit.lake_id}")]
        if before is not None and commit.prev_digest != before:
            return [_damage(key, "does not continue the commit before it")]
        return []


async def _keys(store: Store, prefix: str, after: str = "") -> AsyncGenerator[str, None]:
    async with aclosing(pages(store, prefix, after)) as found:
        async for page in found:
            for entry in page:
                yield entry.key


def _damage(key: str, problem: str) -> Damage:
    return Damage(None, None, key, problem)
