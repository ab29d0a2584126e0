"""Steps to be made into payloads: from lists of spans, and drawn by Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from stepfs_producer.payloads.step import NO_TOKEN, StepTask


@dataclass(frozen=True)
class Part:
    """A span, and the rest of its document behind it."""

    place: tuple[int, int, int, int]  # rank, micro, row, column
    ids: list[int]
    following: int = NO_TOKEN
    mask: list[int] | None = None
    following_learned: bool = True
    address: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # source, epoch, file, offset, first


def task_of(
    shape: tuple[int, int, int], sequence_length: int, parts: list[Part], sources: tuple[str, ...] = ("prose",)
) -> StepTask:
    masked = any(part.mask is not None or not part.following_learned for part in parts)
    masks = [part.mask if part.mask is not None else [1] * len(part.ids) for part in parts]
    return StepTask(
        shape,
        sequence_length,
        tuple(sources),
        np.array([(*p.place, len(p.ids), *p.address) for p in parts], np.int64).reshape(-1, 10),
        np.array([number for part in parts for number in part.ids], np.int32),
        np.array([part.following for part in parts], np.int32),
        np.array([bit for mask in masks for bit in mask], np.uint8) if masked else None,
        np.array([part.following_learned for part in parts], np.uint8) if masked else None,
    )


EXAMPLE = task_of(
    (2, 3, 2),
    4,
    [
        Part((0, 0, 0, 0), [1, 2, 3], 4),
        Part((0, 2, 1, 0), [7, 8, 9, 10]),
        Part((1, 0, 0, 0), [5], address=(1, 2, 3, 1 << 40, 6)),
    ],
    ("code", "prosé"),
)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[StepTask, list[Part]]:
    """Rows filled from the left, some of them cut or left empty; ids are all different."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)))
    length = draw(st.integers(1, 7))
    parts: list[Part] = []
    next_id = 0
    for rank, micro, row in np.ndindex(*shape):
        column = 0
        while column < length and draw(st.integers(0, 4)):
            tokens = draw(st.integers(1, length - column))
            cut = draw(st.booleans())
            parts.append(
                Part(
                    (rank, micro, row, column),
                    list(range(next_id, next_id + tokens)),
                    next_id + tokens if cut else NO_TOKEN,
                    draw(st.none() | st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens)),
                    draw(st.booleans()),
                    (draw(st.integers(0, 1)), 1, 2, 10 * next_id, draw(st.integers(0, 5))),
                )
            )
            column += tokens
            next_id += tokens + 1
    return task_of(shape, length, parts, ("code", "prose")), parts
