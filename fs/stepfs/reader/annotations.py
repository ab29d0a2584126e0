"""A second lake whose steps belong to those of a first: arrays of another model, read beside the batch.

The note of each step names the object whose rows it is about, which no other step has had or will have. So a step of
another lake, of another history, or behind a fork's cut is refused, and nothing else has to be kept in step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stepfs.data.announced_orders import Hint
from stepfs.errors import NoSuchStepError, RefusedError, UsageError
from stepfs.reader.lake import Lake


class Annotations:
    """The lake `lake`, whose steps belong to those of `base`."""

    def __init__(self, base: Lake, lake: Lake) -> None:
        ours, theirs = base.rank_map.grid, lake.rank_map.grid
        if (ours.ranks, ours.micro, ours.cp) != (theirs.ranks, theirs.micro, theirs.cp):
            raise RefusedError(f"{lake.url} has {theirs}, and {base.url} has {ours}: a row needs the file of its row")
        self._base = base
        self.lake = lake
        self._shift: int | None = None  # a step of the base has this number less here

    def arrays_of(self, step: int, rank: int, micro: int, *, decode: Callable[[memoryview], Any]) -> dict[str, Any]:
        """The decoded arrays that belong to a micro-batch of the base. Waits until they are committed.

        `RefusedError` for a step that is about another one, `NoSuchStepError` for one before the first.
        """
        number = step - self._shifted()
        if number < 0:
            raise NoSuchStepError(
                f"{self.lake.url} begins at step {self._shifted()} of {self._base.url}, behind {step}"
            )
        read = self.lake.read
        items = [decode(read(number, rank, micro, name, waits=True)) for name in self.lake.files]
        note = self.lake.note(number)
        own = note if isinstance(note, dict) else {}
        if own.get("of") != self._base.tie(step)["of"]:
            other = ", of another lake or history" if own.get("step") == step else ""
            raise RefusedError(
                f"step {number} of {self.lake.url} belongs to step {own.get('step')!r}{other}, and not to step {step} of "
                f"{self._base.url}: annotate this lake again, into a new one (`note=step.tie()`)"
            )
        if not all(isinstance(item, Mapping) for item in items):
            raise UsageError(
                f"{self.lake.url}: its files have to be arrays by name (.safetensors, .pt); give a `decode` for others"
            )
        return {name: value for item in items for name, value in item.items()}

    def announce(self, hint: Hint) -> None:
        """Fetch ahead what belongs to these steps of the base, where both count alike."""
        if self._shifted() == 0:
            self.lake.announce(hint)

    def _shifted(self) -> int:
        if self._shift is None:
            first = self.lake.first_step
            note = self.lake.note(first) if self.lake.can_follow_to(first) else None
            of = note.get("step") if isinstance(note, dict) else None
            if not isinstance(of, int):
                raise RefusedError(
                    f"{self.lake.url} annotates no lake: its steps need notes (`append(…, note=step.tie())`)"
                )
            self._shift = of - first
        return self._shift


def joined(parts: list[Any], beside: Mapping[str, Any]) -> list[Any]:
    """The micro-batches of a file, with the arrays beside it: of several, each array has a row for each."""
    if not all(isinstance(part, Mapping) for part in parts):
        raise UsageError(
            "what is read beside needs files of arrays by name (.safetensors, .pt); give a `decode` for others"
        )
    for name, value in beside.items():
        if any(name in part for part in parts):
            raise UsageError(f"both lakes have an array {name!r}: name that of the second one otherwise")
        if len(parts) > 1 and len(value) != len(parts):
            raise UsageError(
                f"array {name!r} beside has {len(value)} rows for {len(parts)} micro-batches: give it one for each"
            )
    if len(parts) == 1:
        return [{**parts[0], **beside}]
    return [{**part, **{name: value[n : n + 1] for name, value in beside.items()}} for n, part in enumerate(parts)]
