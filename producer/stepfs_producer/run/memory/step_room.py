"""Room for steps under way: so many, and of the rows of their columns so many bytes.

Tokens have a known size, so the number of steps bounds them. Rows have not: a step of large images may have a hundred
times as many bytes as another. So a step is counted as soon as its plan shows its rows; before, its loaders are bounded
(`run/memory/bounds.py`).

A step that is too large by itself is made alone, with one warning: the memory that it waits for would never be there.
"""

from __future__ import annotations

import logging
from typing import Final

import trio

_log = logging.getLogger("stepfs.producer")
COPIES: Final = 3  # of a row: in its group's body, in the arrays of a step, in its file


class StepRoom:
    """Taken in the order of steps by one task; given back by any."""

    def __init__(self, steps: int, bytes_max: int | None = None) -> None:
        """`steps` at once; of `bytes_max` in rows and their copies, None: as many as there are."""
        self._steps = steps
        self._bytes_max = bytes_max
        self.row_bytes = 0  # of the steps under way
        self._given = trio.Event()
        self._told = False

    async def take(self, row_bytes: int) -> None:
        """Wait until one more step may be made, whose columns have so many bytes."""
        most = self._bytes_max
        if most is not None and COPIES * row_bytes > most and not self._told:
            self._told = True
            _log.warning(
                "a step has %d MiB in its columns, and takes %d times that while it is made; --memory leaves %d MiB: such"
                " steps are made one by one, and above it. Give more --memory, or make smaller steps",
                row_bytes >> 20,
                COPIES,
                most >> 20,
            )
        while not self._steps or (
            most is not None and self.row_bytes and COPIES * (self.row_bytes + row_bytes) > most
        ):
            self._given = trio.Event()
            await self._given.wait()
        self._steps -= 1
        self.row_bytes += row_bytes

    def give(self, row_bytes: int) -> None:
        """A step of so many bytes is done."""
        self._steps += 1
        self.row_bytes -= row_bytes
        self._given.set()
