"""`StepDataset`: the steps of one rank for torch's DataLoader, read without a mount, decoded by the lake's extension.

A loader's workers take turns: worker w of N gets the items w, w + N, …, and the loader yields them in that order. Each is
a process with a reader of its own, which fetches ahead only the steps that it will yield.
"""

import io
import itertools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Final, Self, cast

from stepfs._internal.background import generation
from stepfs.data.announced_orders import ShuffledOrder, ShuffleHint, StridedOrder
from stepfs.errors import NoSuchStepError, RefusedError, UsageError
from stepfs.format.arguments import STATE_VERSION, check_integer, check_state_version
from stepfs.format.ids import Step
from stepfs.lake.origins import check_resumable
from stepfs.reader.annotations import Annotations, joined
from stepfs.reader.lake import Lake, Sampler
from stepfs.torch import holds_micro_batches, micro_batches, need, need_torch
from stepfs.view.inodes import STEP_MAX
from stepfs.view.ranks import RankMap, nearest_divisors

_log = logging.getLogger("stepfs.reader")

_TORCH: Final = "pass no `DistributedSampler`; in Lightning `Trainer(use_distributed_sampler=False)`"
_ACCELERATE: Final = "in accelerate do not `prepare` the loader, only model and optimizer"
_SHARDERS: Final = {  # class of the code that asks: what to do
    "DistributedSampler": _TORCH,
    "DistributedSamplerWrapper": _TORCH,
    "UnrepeatedDistributedSampler": _TORCH,
    "_DatasetSamplerWrapper": _TORCH,
    "BatchSamplerShard": _ACCELERATE,
    "IterableDatasetShard": _ACCELERATE,
    "DataLoaderDispatcher": _ACCELERATE,
}
_STRIDES_MIN: Final = 3  # of the job's size in a row: nobody reads so by chance
_SAMPLERS_MAX: Final = 8
_OF_ONE: Final = frozenset({"files", "near"})  # options of a lake that are not those of the lake beside it
_told = False

Decode = Callable[[memoryview], Any]
_turns = itertools.count()


def warn_if_sharded(ranks: int) -> None:
    """Warn, once in a process, if a framework's code that deals out data among processes is asking for that of one of
    `ranks` ranks: each rank would train on a part of its own steps. By names of code, and of the samplers of the loader
    that asks, in a job of several processes.
    """
    if _told or ranks < 2 or processes() < 2:
        return
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to see who asks
    while frame is not None:
        names = [frame.f_code.co_qualname.partition(".")[0], *_samplers_of(frame.f_locals.get("self"))]
        deals = frame.f_locals.get("num_replicas") != 1
        advice = next((_SHARDERS[name] for name in names if name in _SHARDERS and deals), None)
        if advice is not None:
            _warn_of_dealing(advice)
            return
        frame = frame.f_back


def _samplers_of(asks: object) -> Iterator[str]:
    """The names of the samplers, one inside the other, if it is torch's iterator of a loader: data sets around ours do
    not tell who samples them.
    """
    sampler = getattr(asks, "_index_sampler", None)
    for _ in range(_SAMPLERS_MAX):
        if sampler is None or getattr(sampler, "num_replicas", 0) == 1:
            return
        yield from (kind.__name__ for kind in type(sampler).__mro__)
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))


def _warn_of_dealing(advice: str) -> None:
    global _told  # noqa: PLW0603 - there is one process
    _told = True
    _log.warning(
        "each rank's data is its own already, and a framework deals it out once more among %d processes: steps are "
        "left out, or come to other ranks; %s",
        processes(),
        advice,
    )


def processes() -> int:
    """The number of processes of the training job; 1 where there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isascii() and size.isdigit() else 1


def decoder(ext: str) -> Decode:
    """The decoder of an extension, `bytes` for others. `MissingPackageError` without the package that it needs."""
    if ext == ".pt":
        need_torch("decoding .pt files")
    if ext == ".safetensors":
        need("safetensors", "torch", "decoding .safetensors files")
    return {".pt": _load_torch, ".npy": _load_numpy, ".safetensors": _load_safetensors}.get(ext, bytes)


def _load_torch(payload: memoryview) -> Any:
    import torch  # noqa: PLC0415 - heavy

    return _full(torch.load(io.BytesIO(payload)))


def _load_numpy(payload: memoryview) -> Any:
    import numpy as np  # noqa: PLC0415 - heavy

    return np.load(io.BytesIO(payload))


def _load_safetensors(payload: memoryview) -> Any:
    from safetensors.torch import load  # noqa: PLC0415 - heavy, and of the extra `torch`

    return _full(load(bytes(payload)))


def _full(found: Any) -> Any:
    """The full arrays, also of a file of compact ones, or with encoded images."""
    from stepfs._internal.compact_arrays import expand, is_compact  # noqa: PLC0415 - numpy is heavy
    from stepfs._internal.image_patches import holds_encoded  # noqa: PLC0415 - as above

    return expand(found) if is_compact(found) or holds_encoded(found) else found


def _split(file: Any) -> list[Any]:
    """The micro-batches of a decoded file; one that is none of a plan counts as one."""
    return micro_batches(file) if holds_micro_batches(file) else [file]


def regrouped(held: Sequence[list[Any]], ranks: RankMap, rank: int) -> list[Any]:
    """The micro-batches of a rank, from those of its files.

    `UsageError` if the data ranks do not divide the micro-batches of the step.
    """
    each = len(held[0])
    if any(len(file) != each for file in held):
        raise UsageError(f"files of {[len(file) for file in held]} micro-batches: those of a step have equally many")
    units, data = ranks.grid.units * each, ranks.data_ranks
    if units % data:
        split = any(holds_micro_batches(part) for file in held for part in file) or ranks.grid.micro > 1
        whole = (
            "" if split else
            ". A file of this lake counts as one, because only .safetensors and .pt of plans are split here: produce those, or"
            " a file for each micro-batch (output.files: micro_batches)"
        )  # fmt: skip
        raise UsageError(
            f"mesh: its data dimensions have {data} ranks, which do not divide the {units} micro-batches of a step;"
            f" {nearest_divisors(units, data)} would{whole}"
        )
    begin = ranks.data_rank_of(rank) * (units // data) - ranks.units_of(rank).start * each
    return list(itertools.islice(itertools.chain(*held), begin, begin + units // data))


class _SplitLake(Lake):
    """A lake whose files are split into micro-batches here, so that its mesh may be of any size."""

    splits = True


class StepDataset:
    """The decoded data of rank `rank` in each step, from `start` on.

    With `mesh`, or if a rank of the lake has a file for each micro-batch, an item is the list of the rank's micro-batches in
    the order in which it accumulates them: the same global batch for any number of data ranks. Files with several
    micro-batches (`.pt` and `.safetensors` of plans) are split for that, as `stepfs.torch.micro_batches` does.

    Columns that a plan gave a file of their own (`file: own`) are joined in: an item is the same as without. A stage that needs
    none of them passes `files=()`, and none is fetched; `files="pixels"` reads that one alone. Files that are not decoded to
    mappings of arrays come as a dict, each by its name, the rank's as "".

    With `beside`, the arrays of a second lake are joined in, whose step belongs to this one: `append(…, note=step.tie())`
    says so, and a step that belongs to another one is refused.

    With `stop` it is map-style: item i is step `start + i`, for any sampler. Without, it is iterable: the steps in order, to
    the end of a sealed lake, for `DataLoader(dataset, batch_size=None)`. It waits for steps that are not committed yet, as
    a mount does under `--steps`.
    """

    def __new__(cls, *_args: Any, stop: int | None = None, iterable: bool | None = None, **_options: Any) -> Self:
        kind: type[StepDataset] = cls
        if cls not in {StepDataset, _Stream, _Items}:
            raise UsageError(
                "StepDataset is map-style or iterable as its arguments say, so it has no subclasses: pass `decode`, or hold "
                "one in a dataset of your own"
            )
        if cls is StepDataset:
            kind = _Stream if iterable or (iterable is None and stop is None) else _Items
        if kind is _Stream:
            need_torch("an iterable StepDataset")
            from torch.utils.data import IterableDataset  # noqa: PLC0415 - heavy, and only a loader asks for it

            IterableDataset.register(kind)
        return cast("Self", super().__new__(kind))

    def __init__(
        self,
        lake: Lake | str,
        *,
        rank: int,
        start: int = 0,
        stop: int | None = None,
        iterable: bool | None = None,
        batch_size: int | None = None,
        decode: Decode | None = None,
        beside: Lake | str | None = None,
        **options: Any,
    ) -> None:
        """`lake`: a `Lake`, or a URL and its `options`, such as `mesh="dp=4,tp=2"`; they are those of `beside`, too, but for
        `files` and `near`, and it is a `Lake` where `lake` is one. `iterable`: that style also with `stop`. `batch_size`: the
        loader's, if it has one and the dataset is iterable; without it batches would hold the steps of one worker. `decode`:
        payload → item, in the worker; by default `torch.load`, `numpy.load`, safetensors' `load` by the lake's extension, or
        `bytes`.

        `UsageError` for a rank or a range that the lake does not have.
        """
        del iterable
        self._start, self._stop = (check_integer(start, "start"), None if stop is None else check_integer(stop, "stop"))
        self._rank = check_integer(rank, "rank")
        self._block = 1 if batch_size is None else check_integer(batch_size, "batch_size")
        if self._start < 0:
            raise UsageError(f"start is {start}: steps count from 0")
        if not self._start <= (STEP_MAX if self._stop is None else self._stop) <= STEP_MAX + 1:
            raise UsageError(f"steps {start} to {stop}: start must not be beyond stop")
        if self._block < 1:
            raise UsageError(f"batch_size {batch_size}: give 1 or more, or None")
        if isinstance(lake, Lake) and options:
            raise UsageError(f"{', '.join(options)}: these options belong to the Lake")
        of_rank = {"ranks": self._rank} | options
        self.lake = lake if isinstance(lake, Lake) else _SplitLake(lake, **of_rank)
        if not 0 <= self._rank < self.lake.world:
            raise UsageError(f"rank {rank}: this lake has ranks 0 to {self.lake.world - 1}")
        self._decode = decode or decoder(self.lake.ext)
        self._beside: Annotations | None = None
        if beside is not None:
            if isinstance(beside, Lake) != isinstance(lake, Lake):
                raise UsageError("lake and beside: give two URLs, or two Lakes")
            of_both = {name: value for name, value in of_rank.items() if name not in _OF_ONE}
            second = beside if isinstance(beside, Lake) else _SplitLake(beside, **of_both)
            self._beside = Annotations(self.lake, second)
            self._decode_beside = decode or decoder(self._beside.lake.ext)
        self._let_rest()
        self._sampler: Sampler | None = None
        self._place = (0, 1)  # (worker, workers) of the loader in this process
        self._generation = -1

    @property
    def lakes(self) -> list[Lake]:
        """The lakes that it reads: each has a group of its own to be told of checkpoints."""
        return [self.lake] if self._beside is None else [self.lake, self._beside.lake]

    def waits(self) -> dict[str, Any]:
        """`Lake.waits` of its lake, in this process: of a loader's workers each has its own."""
        return self.lake.waits()

    def _let_rest(self) -> None:
        """Those that were opened here: mostly it is workers that read."""
        for lake in self.lakes:
            if isinstance(lake, _SplitLake):
                lake.rest()

    def _announce(self, hint: ShuffleHint) -> None:
        self.lake.announce(hint)
        if self._beside is not None:
            self._beside.announce(hint)

    @property
    def steps(self) -> range:
        """The steps of a map-style dataset: item i is `steps[i]`. `UsageError` for an iterable one."""
        if isinstance(self, _Stream) or self._stop is None:
            raise UsageError("an iterable data set goes in the order of steps: give it `stop` alone")
        return range(self._start, self._stop)

    def fetch_in_order_of(self, sampler: Sampler) -> None:
        """Fetch ahead in this order from now on, in place of an earlier sampler's."""
        self._sampler = sampler
        for lake in self.lakes:
            lake.samplers.add(sampler)

    def _enter(self) -> tuple[int, int]:
        """(this worker, number of workers) of the loader in this process; (0, 1) where there is none."""
        if self._generation != generation():
            self._generation = generation()
            data = sys.modules.get("torch.utils.data")
            found = None if data is None else data.get_worker_info()
            self._place = (0, 1) if found is None else (found.id, found.num_workers)
            if found is not None:
                trainer = multiprocessing.parent_process()
                for lake in self.lakes:
                    lake.as_worker(found.num_workers, owner=None if trainer is None else trainer.pid)
        return self._place

    def _read(self, step: int) -> Any:
        ranks = self.lake.rank_map
        files = [self._joined(step, number) for number in range(len(ranks.units_of(self._rank)))]
        whole = self.lake.options.mesh is None and ranks.grid.micro == 1
        held = [[file] if whole else _split(file) for file in files]
        if self._beside is not None:
            places = [(step, self._rank, number) for number in range(len(held))]
            arrays = [self._beside.arrays_of(*place, decode=self._decode_beside) for place in places]
            held = list(map(joined, held, arrays))
        return held[0][0] if whole else regrouped(held, ranks, self._rank)

    def _joined(self, step: int, micro: int) -> Any:
        """One micro-batch, or a file of several: its files, decoded, as one."""
        read = self.lake.read
        items = {name: self._decode(read(step, self._rank, micro, name, waits=True)) for name in self.lake.files}
        if len(items) == 1:
            return next(iter(items.values()))
        if not all(isinstance(item, Mapping) for item in items.values()):
            return items
        return {name: value for item in items.values() for name, value in item.items()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_generation": -1}


class _Stream(StepDataset):
    """The iterable style."""

    def __iter__(self) -> Iterator[Any]:
        worker, workers = self._enter()
        if worker == 0:
            warn_if_sharded(self.lake.world)
        stop = STEP_MAX + 1 if self._stop is None else self._stop
        first = self._start + worker * self._block
        order = StridedOrder(Step(first), Step(stop), self._block, workers * self._block, next(_turns))
        return _Pass(self.lake, order, self._read, self._announce)


class _Pass:
    """One pass through an iterable dataset, in one process. Its state is its next step, for torchdata's
    `StatefulDataLoader`: a loader that goes on reads no step twice.
    """

    def __init__(
        self, lake: Lake, order: StridedOrder, read: Callable[[int], Any], announce: Callable[[ShuffleHint], None]
    ) -> None:
        self._lake, self._order, self._read, self._announce = lake, order, read, announce
        self._place = 0
        self._told = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._place >= len(self._order):
            raise StopIteration
        step = self._order.step_at(self._place)
        if not self._told:
            self._told = True
            self._announce(ShuffleHint(self._order, self._place))
        if not self._lake.can_follow_to(step):
            raise StopIteration
        item = self._read(step)
        self._place += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        step = self._order.step_at(self._place)
        return {"version": STATE_VERSION, "lake_id": self._lake.lake_id, "next_step": step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the state's step. `RefusedError` for the state of another lake, or of other turns of the workers."""
        check_state_version(state)
        step = Step(check_integer(state.get("next_step"), "the state of a StepDataset: next_step"))
        check_resumable(state.get("lake_id"), step, self._lake.lake_id, self._lake.origin_cuts)
        order = self._order
        place = len(order) if step == order.step_at(len(order)) else order.place_of(step)
        if place is None:
            raise RefusedError(
                f"the loader's state goes on at step {step}, which this worker does not read: give the dataset the `start` and "
                "`batch_size` that it had"
            )
        self._place = place


class _Items(StepDataset):
    """The map style: announces the next steps as soon as its own requests show their order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self._stop is None:
            raise UsageError("a map-style dataset has a length: give `stop`")
        self._next: int | None = None  # the item that begins the next request, if they go on in order
        self._announced = False
        self._drawn: tuple[ShuffledOrder, int] | None = None  # the sampler's order, and the place that comes next
        self._before: int | None = None  # the first item of the last request
        self._strides = 0  # requests in a row that left out the items of the job's other processes

    def __len__(self) -> int:
        assert self._stop is not None
        warn_if_sharded(self.lake.world)
        return self._stop - self._start

    def __getitem__(self, item: int) -> Any:
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[Any]:
        """The items of one batch: the request of a loader with a batch size."""
        numbers = [self._number(item) for item in items]
        if numbers:
            self._look_ahead(numbers)
        return [self._read(self._start + number) for number in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self[item] for item in range(len(self)))

    def _number(self, item: int) -> int:
        number, count = check_integer(item, "item"), len(self.steps)
        number += count if number < 0 else 0
        if not 0 <= number < count:
            raise NoSuchStepError(f"item {item}: this dataset has {count}")
        return number

    def _look_ahead(self, numbers: list[int]) -> None:
        worker, workers = self._enter()
        if not _told and self.lake.world > 1:
            self._look_for_dealing(numbers, workers)
        if self._sampler is not None:
            self._look_ahead_shuffled(self._sampler, numbers, worker, workers)
            return
        first, count = numbers[0], len(numbers)
        in_order = numbers == list(range(first, first + count))
        is_fresh = self._next is None or self._next >= len(self.steps)  # nothing was read, or a pass has ended
        goes_on, begins = first == self._next, is_fresh and first == worker * count
        self._next = first + workers * count
        if in_order and (goes_on or begins):
            if not (goes_on and self._announced):
                self._announced = True
                begin, stop = Step(self._start + first), Step(self.steps.stop)
                order = StridedOrder(begin, stop, count, workers * count, next(_turns))
                self._announce(ShuffleHint(order, 0))
        else:
            self._announced = False

    def _look_for_dealing(self, numbers: list[int], workers: int) -> None:
        """Whoever deals out the items of this rank as if they were the job's is told: by its loader at the first request,
        by the stride of the requests where no loader is in sight.
        """
        before, self._before = self._before, numbers[0]
        if before is None:
            warn_if_sharded(self.lake.world)
            return
        among = processes()
        dealt = among > 1 and numbers[0] - before == among * len(numbers) * workers
        self._strides = self._strides + 1 if dealt else 0
        if self._strides == _STRIDES_MIN:
            _warn_of_dealing("give each rank all items of its data set, in the order of `ShuffledSteps` or its own")

    def _look_ahead_shuffled(self, sampler: Sampler, numbers: list[int], worker: int, workers: int) -> None:
        """Announce the sampler's order once a pass through it begins, or goes on where nobody said so."""
        order, count = sampler.order, len(numbers)
        place = order.place_of(Step(self._start + numbers[0]))
        if place is None or (
            workers > 1 and count > 1
        ):  # no order is announced of which a worker reads batches in turn
            return
        begins, goes_on = place == sampler.position + worker, self._drawn == (order, place)
        if begins or (goes_on and not self._announced):
            self._announce(ShuffleHint(*order.dealt(place, workers)))
        self._announced = begins or goes_on
        self._drawn = order, place + workers * count

    def state_dict(self) -> dict[str, int]:
        """The state that torchdata's `StatefulDataLoader` asks for: its workers are made before their sampler knows its epoch."""
        return {} if self._sampler is None else self._sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if self._sampler is not None and state and state.get("epoch") != self._sampler.order.epoch:
            self._sampler.load_state_dict(state)
