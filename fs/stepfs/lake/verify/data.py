"""`verify`: does every committed byte exist, unchanged, and what repairs one that does not? Trusts the log's checksums only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import trio
from crc32c import crc32c

from stepfs.errors import (
    CorruptError,
    NewerFormatError,
    ReclaimedError,
    RefusedError,
    StoreUnreachableError,
    UsageError,
    command,
)
from stepfs.format.identity import HEAD_BYTES, LakeIdentity, payload_problem
from stepfs.format.ids import BLOCK_BYTES, SEGMENT_STEPS, SegmentIndex, SliceIndex, Step
from stepfs.format.keys import LAKE, control_prefix, index_prefix, log_prefix, nodes_prefix, segment_of, snapshot_prefix
from stepfs.format.snapshot import StepEntry
from stepfs.format.tgb import (
    ALIGNMENT_BYTES,
    FOOTER_BYTES,
    HEADER,
    Descriptor,
    SliceRef,
    read_footer,
    read_header,
    read_index,
)
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginLostError, OriginStores

Problem = tuple[int | None, str]  # (slice, or None for the object as a whole; description)

_EMPTY: Final = crc32c(b"")

WINDOW_BYTES: Final = 8 << 20
TASKS: Final = 4
_UNREAD_MAX: Final = 2 * TASKS  # objects in a row; beyond that the store is at fault
_ERRORS_MAX: Final = 10_000  # a lake that lost its data directory must not fill memory with errors

STRAY: Final = "stands far behind all others, and no stepfs wrote it there"


class TgbCheck:
    """One object described by `tgb`. Not thread-safe; CPU-bound, so call `feed` in a worker thread.

    `content`: the extension whose signature each slice must have; "" accepts any bytes.
    """

    def __init__(self, tgb: Descriptor, *, content: str = "") -> None:
        self._tgb = tgb
        self._content = content
        self._first = bytearray()  # bytes of the current slice
        slices = [(tgb.slice(SliceIndex(index)), index) for index in range(tgb.slices)]
        self._slices = sorted(slices, key=lambda pair: (pair[0].offset, pair[1]))
        self._tail_from = max(ref.offset + ref.length for ref, _ in slices)
        self._next = 0  # slices before this one are complete
        self._offset = 0
        self._crc = _EMPTY
        self._block_crc = _EMPTY
        self._blocks: list[int] = []
        self._end = ALIGNMENT_BYTES  # of the header, then of the slice before
        self._dirty = False  # a byte between the slices is not zero
        self._header = bytearray()
        self._tail = bytearray()
        self._problems: list[Problem] = []

    def feed(self, piece: memoryview) -> None:
        start, end = self._offset, self._offset + len(piece)
        self._offset = end
        if start < ALIGNMENT_BYTES:
            self._header += piece[: ALIGNMENT_BYTES - start]
        while self._next < len(self._slices):
            ref, index = self._slices[self._next]
            self._dirty |= any(piece[max(0, self._end - start) : max(0, ref.offset - start)])
            low, high = max(ref.offset, start), min(ref.offset + ref.length, end)
            if low < high:
                self._fold(ref, piece[low - start : high - start], low - ref.offset)
            if end < ref.offset + ref.length:
                break
            self._close(ref, index)
        if end > self._tail_from:
            self._tail += piece[max(0, self._tail_from - start) :]

    def finish(self) -> list[Problem]:
        """All problems of the object; call it after the last byte. `NewerFormatError`."""
        for ref, index in self._slices[self._next :]:
            self._problems.append((index, f"the object ends before byte {ref.offset + ref.length}"))
        try:
            self._check_frame()
        except CorruptError as error:
            self._problems.append((None, str(error)))
        return self._problems

    def _fold(self, ref: SliceRef, bytes_in: memoryview, at: int) -> None:
        """Bytes [at, at + len) of the current slice."""
        self._crc = crc32c(bytes_in, self._crc)
        if at < HEAD_BYTES:
            self._first += bytes_in[: HEAD_BYTES - at]
        if not ref.blocks:
            return
        while bytes_in:
            left = BLOCK_BYTES - at % BLOCK_BYTES
            part = bytes_in[:left]
            self._block_crc = crc32c(part, self._block_crc)
            at += len(part)
            bytes_in = bytes_in[left:]
            if at % BLOCK_BYTES == 0 or at == ref.length:
                self._blocks.append(self._block_crc)
                self._block_crc = _EMPTY

    def _close(self, ref: SliceRef, index: int) -> None:
        if self._crc != ref.crc32c:
            self._problems.append((index, "checksum mismatch"))
        elif tuple(self._blocks) != ref.blocks:
            self._problems.append((index, "the log's block checksums do not match a slice that is intact"))
        elif self._content:
            problem = payload_problem(self._content, bytes(self._first), ref.length)
            if problem is not None:
                self._problems.append((index, f"content: {problem}"))
        self._first = bytearray()
        self._crc = self._block_crc = _EMPTY
        self._blocks = []
        self._end = max(self._end, ref.offset + ref.length)
        self._next += 1

    def _check_frame(self) -> None:
        what = self._tgb.key
        read_header(bytes(self._header), what)
        if self._header != HEADER:
            self._problems.append((None, "the header is not as it was written"))
        if len(self._tail) < FOOTER_BYTES:
            read_footer(bytes(self._tail), size=self._offset, what=what)
        offset, length = read_footer(bytes(self._tail[-FOOTER_BYTES:]), size=self._offset, what=what)
        if offset < self._tail_from:
            self._problems.append((None, f"the index at {offset} overlaps slices that end at {self._tail_from}"))
            return
        start = offset - self._tail_from
        if self._dirty or any(self._tail[:start]):
            self._problems.append((None, "there are bytes where only padding should be"))
        index = read_index(bytes(self._tail[start : start + length]), size=self._offset, what=what)
        if (index.packed_slices, index.packed_blocks) != (self._tgb.packed_slices, self._tgb.packed_blocks):
            self._problems.append((None, "the object's own index disagrees with the log"))
        elif index.seq != self._tgb.seq:
            self._problems.append((None, f"the object says seq {index.seq}, the log {self._tgb.seq}"))


@dataclass(frozen=True, slots=True)
class Damage:
    """One difference from the committed contents. `step` or `slice` is None when it concerns more than one."""

    step: Step | None
    slice: int | None
    key: str
    problem: str


@dataclass(slots=True)
class Verification:
    """The checked amounts, and the damage found."""

    steps: int = 0
    slices: int = 0
    payload_bytes: int = 0
    errors: list[Damage] = field(default_factory=list)

    def damaged(self, *damages: Damage) -> None:
        self.errors += damages[: max(0, _ERRORS_MAX - len(self.errors))]


async def verify_lake(
    log: LogReader, *, origins: OriginStores, progress: Callable[[Verification], None] | None = None, content: str = ""
) -> Verification:
    """Check all steps that are live now. Never raises `CorruptError`: the result lists damage.

    Steps that are reclaimed meanwhile count as no damage. An unreadable object is damaged if other objects of its
    store can be read. If none can, the store is at fault: `StoreUnreachableError` or `RefusedError`. `content`: a slice
    without the signature of this extension is damage, too.
    """
    scan = _Scan(log, origins, progress or (lambda _: None), content)
    await scan.run(log.first_live_step, log.state.next_step)
    await scan.retry()
    result = scan.result
    if result.errors and await log.confirm():
        live = log.first_live_step
        result.errors = [d for d in result.errors if d.step is None or d.step >= live]
    result.errors.sort(key=lambda damage: (damage.step or 0, damage.slice or 0))
    return result


class _Scan:
    """One pass over all objects; `result` grows."""

    def __init__(
        self, log: LogReader, origins: OriginStores, progress: Callable[[Verification], None], content: str
    ) -> None:
        self._content = content
        self.result = Verification()
        self._log = log
        self._origins = origins
        self._progress = progress
        self._unread: list[StepEntry] = []
        self._unread_in_a_row = 0
        self._lost: dict[int, tuple[OriginLostError, list[Step]]] = {}  # by origin: the steps that only it has
        self._answered: set[int] = set()  # origins whose store has answered

    async def run(self, first: Step, end: Step) -> None:
        send, receive = trio.open_memory_channel[StepEntry](TASKS)
        async with trio.open_nursery() as nursery, receive:
            for _ in range(TASKS):
                nursery.start_soon(self._work, receive.clone())
            async with send:
                await self._feed(first, end, send)

    async def retry(self) -> None:
        """Read unreadable objects once more, if their store has answered for others. A lost origin is one damage."""
        for error, steps in self._lost.values():
            problem = f"{len(steps)} steps from {min(steps)} to {max(steps)} cannot be checked: {error}"
            self.result.damaged(Damage(None, None, "", problem))
        if not self._unread:
            return
        await self._log.confirm()
        window = memoryview(bytearray(WINDOW_BYTES))
        for entry in self._unread:
            try:
                damages = await self._verify_object(entry, window)
            except (RefusedError, StoreUnreachableError) as error:
                if isinstance(error, NewerFormatError) or entry.tgb.origin not in self._answered:
                    raise
                damages = [Damage(entry.step, None, entry.tgb.key, f"cannot be read: {error}")]
            self._seen(entry, damages)

    async def _feed(self, first: Step, end: Step, send: trio.MemorySendChannel[StepEntry]) -> None:
        """Send every entry; an unreadable index segment is one damage, and its steps cannot be checked."""
        number = first
        while number < end:
            try:
                entry = await self._log.entry(number)
            except (CorruptError, ReclaimedError) as error:
                await self._log.confirm()
                if self._log.first_live_step > number:  # reclaimed meanwhile, and perhaps its segment as well
                    number = self._log.first_live_step
                    continue
                segment = SegmentIndex(number // SEGMENT_STEPS)
                past = Step(min(end, (segment + 1) * SEGMENT_STEPS))
                problem = f"steps {number}…{past - 1} cannot be checked: {error}"
                self.result.damaged(Damage(None, None, "", problem))
                number = past
                continue
            await send.send(entry)
            number = Step(number + 1)

    async def _work(self, receive: trio.MemoryReceiveChannel[StepEntry]) -> None:
        window = memoryview(bytearray(WINDOW_BYTES))
        async with receive:
            async for entry in receive:
                try:
                    damages = await self._verify_object(entry, window)
                except OriginLostError as error:
                    self._lost.setdefault(entry.tgb.origin, (error, []))[1].append(entry.step)
                    continue
                except (RefusedError, StoreUnreachableError) as error:
                    if isinstance(error, NewerFormatError):
                        raise
                    self._unread.append(entry)
                    self._unread_in_a_row += 1
                    if self._unread_in_a_row > _UNREAD_MAX:
                        raise
                    continue
                self._unread_in_a_row = 0
                self._answered.add(entry.tgb.origin)
                self._seen(entry, damages)

    async def _verify_object(self, entry: StepEntry, window: memoryview) -> list[Damage]:
        tgb, store = entry.tgb, await self._origins.of(entry.tgb, self._log.state)
        check = TgbCheck(tgb, content=self._content)
        offset = 0
        while offset < tgb.size:
            size = min(len(window), tgb.size - offset)
            try:
                got = await store.read_into(tgb.key, offset, window[:size])
            except UsageError as error:  # the log names an invalid key
                return [Damage(entry.step, None, tgb.key, str(error))]
            if got is None:
                return [Damage(entry.step, None, tgb.key, "the object is missing")]
            await trio.to_thread.run_sync(check.feed, window[:got])
            if got < size:
                return [Damage(entry.step, None, tgb.key, f"the object ends at byte {offset + got} of {tgb.size}")]
            offset += got
        return [Damage(entry.step, index, tgb.key, problem) for index, problem in check.finish()]

    def _seen(self, entry: StepEntry, damages: list[Damage]) -> None:
        self.result.steps += 1
        self.result.slices += entry.tgb.slices
        self.result.payload_bytes += entry.tgb.payload_bytes
        self.result.damaged(*damages)
        self._progress(self.result)


def advice(
    url: str,
    lake_id: str | None,
    damages: Iterable[Damage],
    *,
    opens: bool,
    has_beginning: bool,
    live: range,
    control_reads: bool,
) -> list[str]:
    """One line per action, commands whole and quoted for a shell.

    `control_reads`: whether the newest control record can be read. `opens`: whether a reader reaches the head of the log.
    `has_beginning`: whether it at least finds a state to start from, which a fork needs, too. `live`: the steps that a
    reader shows.
    """
    if lake_id is None:
        return [f"restore {LAKE} from a backup: without it nobody knows where the lake's objects are"]
    lines, damages = [], list(damages)
    keys = [damage.key for damage in damages]

    def under(prefix: str) -> list[str]:
        return [key for key in keys if key.startswith(prefix)]

    if not control_reads:
        lines.append(
            "stop every `stepfs reclaim`, and continue the record before the lake's newest control record, which is damaged "
            f"(until then nothing is deleted, and no group changes): {command('stepfs', 'verify', url, '--repair')}"
        )
    strays = {damage.key for damage in damages if damage.problem == STRAY}
    lines += [f"delete {url}/{key}" for key in sorted(strays)]
    if control_reads and set(under(control_prefix(lake_id))) - strays:
        lines.append("only the newest control record is read, and it is sound: nothing to do")
    if not opens and not has_beginning and control_reads:
        lines.append(
            "restore the newest object under snapshot/ from a backup: nothing that can be read says what was before the log"
        )
    elif not opens and (under(log_prefix(lake_id)) or control_reads):
        lines.append(
            f"a new lake with all that comes before the damage: {command('stepfs', 'fork', url, 'NEW', '--until-damage')}"
        )
    if opens and under(log_prefix(lake_id)):
        lines.append("commits that a snapshot covers are not needed to read the lake: nothing to do")
    if opens and under(snapshot_prefix(lake_id)):
        lines.append("readers and producers start from another snapshot: nothing to do")
    lines += _around(url, _lost_steps(lake_id, damages, live), live) if opens else []
    if under(nodes_prefix(lake_id)):
        lines.append("what a mount said of itself is informative only: nothing to do")
    return lines


def from_home(url: str, identity: LakeIdentity | None, damages: Iterable[Damage]) -> list[str]:
    """The line that comes first for a replica, unless only what is its own is damaged."""
    own = () if identity is None else (control_prefix(identity.lake_id), nodes_prefix(identity.lake_id))
    if identity is None or identity.replica_of is None or all(damage.key.startswith(own) for damage in damages):
        return []
    again = command("stepfs", "replicate", identity.replica_of, url, "--check")
    return [f"first put again what {identity.replica_of} has: {again}"]


def is_superseded(lake_id: str | None, damage: Damage) -> bool:
    """Whether it is of a control record. While the newest is sound, the others are never read, and never go."""
    return lake_id is not None and damage.key.startswith(control_prefix(lake_id))


def _lost_steps(lake_id: str, damages: Iterable[Damage], live: range) -> list[int]:
    """Live steps whose data, or whose descriptors, are damaged."""
    lost: set[int] = {damage.step for damage in damages if damage.step is not None}
    for damage in damages:
        segment = (
            segment_of(index_prefix(lake_id), damage.key) if damage.key.startswith(index_prefix(lake_id)) else None
        )
        if segment is not None:
            lost |= set(range(segment * SEGMENT_STEPS, (segment + 1) * SEGMENT_STEPS))
    return sorted(step for step in lost if step in live)


def _around(url: str, lost: list[int], live: range) -> list[str]:
    """The fork that leaves out the first run of lost steps; further runs need further forks, one after another."""
    if not lost:
        return []
    first = end = lost[0]
    while end in set(lost):
        end += 1
    skipped = f"{first}:{end}" if end < live.stop else f"{first}:"
    more = sum(step >= end for step in lost)
    rest = f" ({more} more are damaged: verify NEW, and fork that)" if more else ""
    what = f"restore the objects, or make a new lake without steps {first} to {end - 1}{rest}"
    return [f"{what}: {command('stepfs', 'fork', url, 'NEW', '--skip', skipped)}"]
