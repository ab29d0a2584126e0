"""A sampler for map-style datasets whose order a mount, a `Lake` or a `StepDataset` fetches ahead."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from stepfs.announce import announce_shuffle
from stepfs.data.announced_orders import ShuffledOrder, ShuffleHint
from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError, WrongTypeError
from stepfs.format.arguments import STATE_VERSION, check_integer, check_state_version
from stepfs.format.ids import INTEGER_MAX, Step
from stepfs.reader.dataset import StepDataset, warn_if_sharded
from stepfs.reader.lake import Lake
from stepfs.view.mounted import View
from stepfs.view.tree import ViewOptions

_LOADER_PLACES: Final = 64
_AGAIN_S: Final = 60.0  # seconds until the announcement is repeated, for a restarted daemon


class ShuffledSteps:
    """The steps [first, stop) in an order that is a pure function of seed and epoch; a `torch.utils.data.Sampler`.

        sampler = ShuffledSteps("/mnt/run", first=0, stop=100_000, seed=7)
        loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=8)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    Without a mount: `ShuffledSteps(dataset, seed=7)`, in the steps of that `StepDataset`.

    Yields indices of a dataset whose item 0 is step `first` (index = step - first). Iterating announces the order to
    `source`, which fetches ahead in it; the bytes are the same without it. Every rank makes one sampler, with the same
    arguments but for `shard`. `shard` of `shards`: the ranks split the steps among them; omit both if all ranks read
    every step, each its own slice.

    A checkpoint in the middle of an epoch needs the steps from `first` on: record `sampler.next_step`.
    """

    def __init__(
        self,
        source: str | Path | Lake | StepDataset | None,
        *,
        first: int | None = None,
        stop: int | None = None,
        seed: int = 0,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """`source`: where the dataset reads: the directory of a mount, a `StepDataset`, or a `Lake`, which fetches ahead in
        this process alone, not in a loader's workers. None: only the order. `first` and `stop` are those of the source by
        default: of a mount, of what it lists, if it is mounted with `--steps` or the lake is sealed.

        `UsageError` for a range without steps, or outside of what the source shows.
        """
        first, stop, self._ranks = _range_of(source, first, stop)
        self._source = None if isinstance(source, StepDataset) else source  # it looks ahead by itself, in its workers
        self._first, self._stop = check_integer(first, "first"), check_integer(stop, "stop")
        self._seed = check_integer(seed, "seed")
        self._shard, self._shards = check_integer(shard, "shard"), check_integer(shards, "shards")
        if not 0 <= self._first < self._stop <= INTEGER_MAX:
            raise UsageError(f"steps {first} to {stop}: first must be below stop")
        if not 0 <= self._shard < self._shards <= self._stop - self._first:
            raise UsageError(f"shard {shard} of {shards} does not exist, or has no step")
        if not 0 <= self._seed < 10**16:
            raise UsageError(f"seed {seed} is not in [0, 10^16)")
        self._epoch = self._position = 0
        self._asked: int | None = None  # the epoch that the trainer has set
        self._inside = self._drawn = False
        if isinstance(source, Lake):
            source.samplers.add(self)
        elif isinstance(source, StepDataset):
            source.fetch_in_order_of(self)

    def set_epoch(self, epoch: int, *, position: int = 0) -> None:
        """Set the epoch of the next iteration, and the number of its steps already consumed (to resume in the
        middle).
        """
        self._go_to(check_integer(epoch, "epoch"), check_integer(position, "position"))
        self._asked = self._epoch

    def _go_to(self, epoch: int, position: int) -> None:
        steps = len(self.order)  # of every epoch
        if not 0 <= epoch < 10**16 or not 0 <= position <= steps:
            raise UsageError(f"epoch {epoch} has no position {position}")
        self._epoch, self._position = epoch, position
        self._inside, self._drawn = position > 0, position == steps

    @property
    def next_step(self) -> int:
        """The first step that a checkpoint of this epoch needs, until the epoch has ended."""
        return self._first

    def refuses(self, next_step: int) -> bool:
        """Whether a checkpoint with this next step releases steps that the epoch still needs.

        An epoch has begun with its first draw, or where it is resumed. It needs its steps until the next one begins: a
        loader draws ahead of the training. Once all are drawn, the checkpoint behind all of them may be recorded.
        """
        return self._inside and next_step > self._first and not (self._drawn and next_step >= self._stop)

    def __len__(self) -> int:
        return len(self.order) - self._position

    def __iter__(self) -> Iterator[int]:
        if self._shards == 1:
            warn_if_sharded(self._ranks)
        return _Draws(self)

    def state_dict(self) -> dict[str, int]:
        """The arguments that determine the order, for a checkpoint. The trainer itself knows the consumed number, and so
        does torchdata's `StatefulDataLoader`, which keeps this together with the state of the iterator.
        """
        order = {"seed": self._seed, "first": self._first, "stop": self._stop, "epoch": self._epoch}
        return {"version": STATE_VERSION, **order}

    def load_state_dict(self, state: Mapping[str, int], *, position: int = 0) -> None:
        """Resume in the epoch of `state`, behind `position` consumed steps. `RefusedError` for another order."""
        check_state_version(state)
        expected = {"seed": self._seed, "first": self._first, "stop": self._stop}
        if any(state.get(name) != value for name, value in expected.items()):
            raise RefusedError(f"the checkpoint was trained in the order of {dict(state)}, this is {expected}")
        self._go_to(check_integer(state["epoch"], "epoch"), check_integer(position, "position"))

    @property
    def order(self) -> ShuffledOrder:
        return ShuffledOrder(self._seed, self._epoch, Step(self._first), Step(self._stop), self._shard, self._shards)

    @property
    def position(self) -> int:
        """The place at which a pass through the order begins."""
        return self._position

    def check_place(self, place: int) -> None:
        """`RefusedError` where the trainer has set another epoch than the state's: what is left of that may be nothing."""
        if self._asked not in {None, self._epoch}:
            raise RefusedError(
                f"the loader's state is at place {place} of epoch {self._epoch}, and set_epoch({self._asked}) was called: call"
                f" set_epoch({self._epoch}) to go on there, or begin epoch {self._asked} with a loader that loads no state"
                f" (`set_epoch({self._asked}, position=…)` says where)"
            )

    def note_drawn(self, place: int, order: ShuffledOrder) -> None:
        """The places before this one were drawn."""
        self._inside, self._drawn = place > 0, place == len(order)

    def announce(self, order: ShuffledOrder, at: int) -> None:
        if isinstance(self._source, Lake):
            self._source.announce(ShuffleHint(order, at))
        elif self._source is not None:
            announce_shuffle(self._source, order, at)


class _Draws:
    """One pass through the order of an epoch. Its state is the place, for torchdata's `StatefulDataLoader`."""

    def __init__(self, sampler: ShuffledSteps) -> None:
        self._sampler, self._order = sampler, sampler.order
        self._start = self._place = sampler.position
        self._told_at: float | None = None

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        order, place = self._order, self._place
        if place >= len(order):
            raise StopIteration
        self._place += 1
        self._sampler.note_drawn(self._place, order)
        now = time.monotonic()
        if self._told_at is None or now - self._told_at >= _AGAIN_S:
            # A loader draws steps some places before it opens them; a mount that knows the exact place keeps it.
            self._sampler.announce(order, max(self._start, place - _LOADER_PLACES))
            self._told_at = now
        return order.step_at(place) - order.first

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on behind the places that were drawn. `RefusedError` for a place that the order does not have."""
        place = check_integer(state.get("place"), "the state of a pass through a shuffled order: place")
        if not 0 <= place <= len(self._order):
            raise RefusedError(f"the checkpoint is at place {place} of an order, this one has {len(self._order)}")
        self._sampler.check_place(place)
        self._start = self._place = place
        self._sampler.note_drawn(place, self._order)


def _range_of(source: object, first: int | None, stop: int | None) -> tuple[int, int, int]:
    """First, stop, and the number of ranks, 1 if nobody knows."""
    if isinstance(source, StepDataset):
        steps = source.steps
        if first not in {None, steps.start} or stop not in {None, steps.stop}:
            raise UsageError(
                f"first={first}, stop={stop}: the data set has steps {steps.start} to {steps.stop}; leave both out"
            )
        return steps.start, steps.stop, source.lake.world
    if source is not None and not isinstance(source, str | Path | Lake):
        raise WrongTypeError(
            f"source is a {type(source).__name__}; give a mount's directory, a Lake, a StepDataset, or None"
        )
    if isinstance(source, str) and "://" in source:
        raise UsageError(f"{source} is a lake, not a mount: give `Lake(url)`, or a `StepDataset` that reads it")
    view = _view_of(source, asks=first is None or stop is None)
    if view is None:
        if stop is None:
            raise UsageError("where does the order end? give `stop`")
        return first or 0, stop, 1
    if not view.ends and stop is None:
        raise UsageError(
            "where does the order end? More steps will come: give `stop`, and `first`, the same on every rank"
        )
    listed, steps = view.listed(), view.openable()
    first, stop = listed.start if first is None else first, listed.stop if stop is None else stop
    if not steps.start <= first < stop <= steps.stop:
        raise UsageError(
            f"steps {first} to {stop}: {source.url if isinstance(source, Lake) else source} has steps {steps.start} to {steps.stop}; leave out `first` and `stop` for all "
            "that it lists"
        )
    return first, stop, view.world or 1


def _view_of(source: str | Path | Lake | None, *, asks: bool) -> View | None:
    """What the source shows; None where there is no mount, so that a test or a copy of the files needs none. A mount that
    does not answer is an error only if it `asks` for its steps.
    """
    if isinstance(source, Lake):
        options = ViewOptions(source.options.steps)
        return View(source.lake_id or "", source.first_step, source.next_step, source.sealed, options, source.world)
    try:
        return None if source is None else View.of_mount(Path(source))
    except AbsentError:
        return None
    except StepfsError:
        if asks:
            raise
        return None
