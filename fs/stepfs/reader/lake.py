"""`Lake`: a lake as a sequence of steps, and a step as the bytes of its ranks and micro-batches, for programs that cannot mount.

Any thread may use a `Lake`; its work is done in one background thread (`background`). In another process, made by fork
or by spawn, it opens itself again when it is first used, and reads on in the log where the first one stood.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, Protocol, Self, TypeVar

from stepfs._internal.background import BackgroundLoop, generation
from stepfs.data.announced_orders import Hint, ShuffledOrder
from stepfs.errors import ClosedError, NoSuchStepError, StepfsError, UsageError, WrongTypeError
from stepfs.format.arguments import check_integer
from stepfs.format.codec import Value, unpack
from stepfs.format.grid import Grid
from stepfs.format.ids import SliceIndex, Step
from stepfs.format.snapshot import LogState
from stepfs.format.tgb import SLICE_ENTRY_BYTES
from stepfs.reader.assembly import ReaderParts, open_reader
from stepfs.reader.options import DEADLINE_S, LakeOptions
from stepfs.view.inodes import STEP_MAX
from stepfs.view.ranks import RankMap

T = TypeVar("T")
_Loop = BackgroundLoop[ReaderParts]
_TIE_BYTES: Final = 16
_ENTRY_BYTES: Final = 400  # of a step in a pickle, beside its slices
_PICKLED_BYTES_MAX: Final = 4 << 20  # of the log's tail, for each worker that is spawned; a longer one it reads itself
_CLOSED: Final = "the lake is closed: open it again"


def slice_at(ranks: RankMap, rank: int, micro: int | None, file: str) -> SliceIndex:
    """The slice of `lake[step][rank, micro, file]`; `NoSuchStepError` if there is none.

    `UsageError` without a micro-batch where the rank has several.
    """
    rank = check_integer(rank, "rank")
    if not 0 <= rank < ranks.world:
        raise NoSuchStepError(f"rank {rank}: this lake has ranks 0 to {ranks.world - 1}")
    count, files = len(ranks.units_of(rank)), ranks.grid.files
    if micro is None and count > 1:
        raise UsageError(
            f"rank {rank} reads {count} micro-batches: name one, from [{rank}, 0] to [{rank}, {count - 1}]"
        )
    micro = 0 if micro is None else check_integer(micro, "micro-batch")
    if not 0 <= micro < count:
        raise NoSuchStepError(f"micro-batch {micro}: rank {rank} has micro-batches 0 to {count - 1}")
    if file not in files:
        raise NoSuchStepError(f"file {file!r}: this lake has {', '.join(map(repr, files))}")
    return ranks.slice_of(rank, micro, files.index(file))


class Sampler(Protocol):
    """The order of one rank's steps, epoch by epoch."""

    @property
    def next_step(self) -> int:
        """The first step that a checkpoint of this epoch needs."""

    def refuses(self, next_step: int) -> bool:
        """Whether a checkpoint with this next step releases steps that the epoch still needs."""

    @property
    def order(self) -> ShuffledOrder:
        """The order of this epoch."""

    @property
    def position(self) -> int:
        """The place at which a pass through the order begins."""

    def state_dict(self) -> dict[str, int]:
        """The arguments that determine the order."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on in the epoch of `state`. `RefusedError` for another order."""


class LakeStep(int):
    """A step of a lake: its number, and `step[rank]`, `step[rank, micro]` or `step[rank, micro, "pixels"]`, the bytes of a file.

    For a tensor of numbers write `int(step)`. It has no length: with one, `torch.tensor([step])` would
    read every rank and make numbers of its bytes.
    """

    _lake: Lake

    def __new__(cls, lake: Lake, number: int) -> Self:
        step = super().__new__(cls, number)
        step._lake = lake
        return step

    def __getitem__(self, place: int | tuple[int, int] | tuple[int, int, str]) -> memoryview:
        """The payload of a rank, or of (rank, micro-batch) where a rank has several; with a third part, a file beside it.

        Read-only, contiguous, verified, valid as long as it is held.

        `NoSuchStepError` for a rank, micro-batch or file that the lake does not have, `ReclaimedError` if the step has left the
        lake meanwhile, `CorruptError` for damaged bytes, `StoreUnreachableError` once the store did not deliver within
        `deadline_s`.
        """
        return self._lake.read(self, *place) if isinstance(place, tuple) else self._lake.read(self, place)

    @property
    def note(self) -> Any:
        """What the producer said of this step (`append(…, note=…)`), or None. It reads no data; `ReclaimedError` as above."""
        return self._lake.note(self)

    def tie(self, **words: Value) -> dict[str, Value]:
        """The note of a step in another lake that annotates this one (`StepDataset(…, beside=…)`), with other `words`."""
        return {**words, **self._lake.tie(self)}

    def __len__(self) -> NoReturn:
        raise WrongTypeError(
            f"step {int(self)} is a number: `lake.world` counts its ranks, `int(step)` makes a plain one of it"
        )

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # elsewhere it is a number


class Lake:
    """The steps of the lake at a URL.

        with Lake("s3://training/run", ranks=3, group="pretrain") as lake:
            for step in lake.follow(start):  # waits for steps to come
                batch = numpy.frombuffer(step[3], dtype="uint16")

    The bytes, their order and the waiting are those of `stepfs mount`, without /dev/fuse, privileges or a second process.
    """

    lake_id: str | None = None  # unknown until it was opened for the first time
    slices: int
    ext: str
    splits = False  # whether its reader splits files that hold several micro-batches
    _grid: Grid
    rank_map: RankMap

    def __init__(
        self,
        lake: str,
        *,
        ranks: str | int | Iterable[int] | None = None,
        world: int | None = None,
        mesh: str | None = None,
        files: str | Iterable[str] | None = None,
        steps: str | range | None = None,
        wait: str | float | None = None,
        group: str | None = None,
        prefetch: int | None = None,
        memory: str | int | None = None,
        deadline: str | float = DEADLINE_S,
        poll: str | float = 0.1,
        near: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        """Open a lake. The words have the meaning of `stepfs mount`'s options (fs/OPERATIONS.md).

        `ranks`: the ranks of this process, fetched ahead (`3`, `"0-7"`). `world`, `mesh`: the ranks, of which
        several may read the same. `files`: which files beside the ranks' (a plan's columns with `file: own`) this process reads,
        by name; by default all, `()` for none. Others are not fetched ahead. `steps`: only these (`"A:B"`); those to come are
        waited for. `wait`: seconds that a step beyond the newest is waited for; without it, it is a `NoSuchStepError` at
        once. `group`: the training run whose checkpoints keep steps, registered here. `prefetch`: a fixed number of steps
        to fetch ahead (0: none). `memory`: of this reader, as `"2G"` or in bytes; by default a part of the available memory.
        `deadline`: of every read and wait. `poll`: the shortest interval between looks for new steps. `near`: the URL of
        a replica, or of any place with the lake's objects, from which bytes are read first; else `STEPFS_NEAR`. `endpoint_url`:
        an S3-compatible server; else `STEPFS_ENDPOINT_URL`, then AWS's own variables.

        `UsageError`, `AbsentError`, `RefusedError`, `StoreUnreachableError` as `stepfs mount`.
        """
        words = {name: value for name, value in locals().items() if name not in {"self", "lake"}}
        self._setup(replace(LakeOptions.of(lake, words), splits=self.splits))
        try:
            identity = self._parts().log.identity
        except StepfsError as error:
            raise error.with_traceback(None) from error.__cause__
        self.lake_id, self.slices, self.ext = identity.lake_id, identity.slices, identity.ext
        self._grid, self.rank_map = identity.grid, self._parts().ranks

    def _setup(self, options: LakeOptions) -> None:
        self.options = options
        self._closed = False
        self._loop: _Loop | None = None
        self._known: LogState | None = None  # the log, when it rested
        self._collected: weakref.finalize[[], Lake] | None = None
        self._owner: int | None = None  # the process that ends this one's waits by ending
        self.samplers: weakref.WeakSet[Sampler] = weakref.WeakSet()  # for `CheckpointHook`
        self._locks: dict[int, threading.Lock] = {}  # by generation: a parent's may be held for ever

    def __getitem__(self, step: int) -> LakeStep:
        """A committed step. Beyond the newest one: `NoSuchStepError`, or waits, as `wait` and `steps` say.

        `ReclaimedError` for a step that has left the lake, or that this reader's group gave up.
        """
        number = _numbered(step)
        if not self._parts().tree.readable(number):
            self._call(lambda parts: parts.wait_for(number, waits=False))
        return LakeStep(self, number)

    def follow(self, start: int | None = None) -> Iterator[LakeStep]:
        """The steps from `start` on (default: the oldest), each once, in order, as they are committed.

        Ends behind the last step of `steps`, or of a sealed lake. A step that has left the lake raises `ReclaimedError`: none
        is skipped. A step that does not come in time raises `WaitExpiredError`, under `wait` `NoSuchStepError`.
        """
        number = self.first_step if start is None else Step(check_integer(start, "start"))
        while self.can_follow_to(number):
            yield LakeStep(self, number)
            number = Step(number + 1)

    def can_follow_to(self, step: Step) -> bool:
        """Wait until the step can be read; False if the view ends before it. Raises as `follow`."""
        number = _numbered(step)
        return self._parts().tree.readable(number) or self._call(lambda parts: parts.wait_for(number, waits=True))

    def read(
        self, step: int, rank: int, micro: int | None = None, file: str = "", *, waits: bool = False
    ) -> memoryview:
        """The value of `lake[step][rank, micro, file]`. With `waits`, wait for a step that is not committed yet."""
        number, index = _numbered(step), slice_at(self.rank_map, rank, micro, file)
        return self._call(lambda parts: parts.read(number, index, waits=waits))

    def announce(self, hint: Hint) -> None:
        """Fetch these steps ahead, in this order: advice, as `stepfs.announce` gives it to a mount."""
        self._call(lambda parts: parts.announce(hint))

    @property
    def url(self) -> str:
        return self.options.url

    @property
    def group(self) -> str | None:
        return self.options.group

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.rank_map.world

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each rank reads of a step, as `step[rank, 0]`, `step[rank, 1]` and so on."""
        return self.rank_map.micro_batches

    @property
    def files(self) -> tuple[str, ...]:
        """The files of each micro-batch that this process reads: "", the rank's, and the names of those beside it."""
        grid = self.rank_map.grid
        return tuple(grid.files[number] for number in self.options.files_of(grid))

    @property
    def origin_cuts(self) -> Mapping[str, int]:
        """The lakes that this one was forked from, by id: their steps below this number are the same here."""
        return self._parts().log.state.origin_cuts

    @property
    def first_step(self) -> Step:
        """The oldest step that can be read."""
        return self._parts().tree.first_visible()

    @property
    def next_step(self) -> Step:
        """The number of committed steps, as far as this reader has seen: the step that comes next."""
        tree = self._parts().tree
        tree.ask()
        return tree.next_step

    @property
    def sealed(self) -> bool:
        """Whether no more steps will come."""
        return self._parts().log.state.sealed

    @property
    def steps(self) -> range:
        """The steps that a mount would list now."""
        return self._parts().tree.listed()

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[LakeStep]:
        return (self[step] for step in self.steps)

    def __bool__(self) -> bool:
        return True  # also before the first step

    def holds(self, step: int, rank: int, micro: int | None = None, file: str = "") -> bool:
        """Whether the payload is in memory, whole and verified."""
        number, index = Step(check_integer(step, "step")), slice_at(self.rank_map, rank, micro, file)
        return self._call(lambda parts: parts.holds(number, index))

    def object_of(self, step: int) -> str | None:
        """The key of a step's object, which no other step has had or will have; "" before it is committed, None when it was
        reclaimed.
        """
        number, log = _numbered(step), self._parts().log
        if not log.first_live_step <= number < log.state.next_step:
            return None if number < log.first_live_step else ""
        return self._call(lambda parts: parts.log.entry(number)).tgb.key

    def note(self, step: int) -> Any:
        """The value of `lake[step].note`."""
        number = _numbered(step)
        note = self._call(lambda parts: parts.log.entry(number)).tgb.note
        return unpack(note, f"note of step {number}") if note else None

    def tie(self, step: int) -> dict[str, Value]:
        """The value of `lake[step].tie()`: the object of the step, by a digest of its name."""
        key = self.object_of(step)
        if not key:
            raise NoSuchStepError(f"step {int(step)} is not in the lake: annotate one that can be read")
        return {"step": int(step), "of": hashlib.blake2b(key.encode(), digest_size=_TIE_BYTES).digest()}

    def counts(self) -> dict[str, int]:
        """The counters of this process's data layer (requests, bytes fetched …), as `data` of a mount's status."""
        return self._parts().slices.counts.as_dict()

    def waits(self) -> dict[str, Any]:
        """Why reads waited, in this process: `seconds` and `count` by cause (`commit`, `store`, `memory` …: fs/OPERATIONS.md),
        each thread's waits by themselves; `blocked_s`, in which at least one waited.
        """
        return self._call(lambda parts: parts.sums())

    def close(self) -> None:
        """End the background thread and free the memory; views that were given out stay valid. Idempotent.

        A thread that waits in this `Lake` gets a `ClosedError`.
        """
        self._closed = True
        self.rest()

    def rest(self) -> None:
        """End the background thread until the next use: before a fork, or for hours without reading."""
        self._known = self.known
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
            if self._collected is not None:
                self._collected.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        names = ("options", "lake_id", "slices", "ext", "_grid", "_closed")
        known = self.known
        large = (
            known is not None
            and len(known.tail) * (_ENTRY_BYTES + self.slices * SLICE_ENTRY_BYTES) > _PICKLED_BYTES_MAX
        )
        return {name: getattr(self, name) for name in names} | {
            "_known": replace(known, tail=()) if known and large else known  # enough to notice another history
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._setup(state["options"])
        for name, value in state.items():
            setattr(self, name, value)
        self.rank_map = self.options.ranks_of(self._grid)

    def as_worker(self, workers: int, *, owner: int | None = None) -> None:
        """This process is one of `workers` that read different steps: they share one budget, and each fetches only
        announced steps. When the process `owner` has ended, nothing is read or waited for here any more. Before the
        first use in this process; without effect later.
        """
        loop = self._loop
        if loop is None or not loop.is_here:
            self.options, self._owner = self.options.of_worker(workers), owner

    def _call(self, work: Callable[[ReaderParts], Awaitable[T]]) -> T:
        while True:
            loop = self._running()
            try:
                return loop.call(partial(work, loop.parts))
            except ClosedError:
                if self._closed or loop is self._loop:
                    raise  # else another thread let this lake rest

    def _parts(self) -> ReaderParts:
        return self._running().parts

    def _running(self) -> _Loop:
        """The loop of this process, started when there is none."""
        loop = self._loop
        if loop is not None and loop.is_here:
            return loop
        with self._locks.setdefault(generation(), threading.Lock()):
            loop = self._loop
            if loop is None or not loop.is_here:
                if self._closed:
                    raise ClosedError(_CLOSED)
                opening = partial(open_reader, self.options, self.lake_id, self.known)
                loop = BackgroundLoop(opening, name="stepfs-reader", closed=_CLOSED, owner=self._owner)
                self._collected = weakref.finalize(self, loop.stop, join_s=0)
                self._collected.atexit = False  # `background` ends all loops at exit
                self._loop = loop
            if self._closed:  # by another thread, meanwhile
                self.rest()
            return loop

    @property
    def known(self) -> LogState | None:
        """The log as this process, or the one that it was forked from, saw it: a worker need not read it again."""
        loop = self._loop
        if loop is not None:
            with suppress(StepfsError):  # it has failed
                return loop.parts.log.knows
        return self._known


def _numbered(step: object) -> Step:
    number = check_integer(step, "step")
    if not 0 <= number <= STEP_MAX:
        raise NoSuchStepError(f"step {number}: steps count from 0; the newest is `lake.next_step - 1`")
    return Step(number)
