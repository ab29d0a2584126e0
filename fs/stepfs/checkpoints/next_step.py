"""From a trainer's counter to the first step still needed: explicit, because off-by-one here loses data.

A checkpoint named 100 may have consumed steps 0…99 (Hugging Face: next is N) or 0…100 (next is N+1), and a counter of
optimizer steps with gradient accumulation 4 means N*4. The user gives the expression; nothing is guessed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Final

from stepfs.errors import UsageError
from stepfs.format.ids import INTEGER_MAX, Step

_TEXT_MAX: Final = 64
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class NextStep:
    """The parsed `--next-step`: integers, N, + - * // and parentheses."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text[:_TEXT_MAX].strip(), mode="eval") if len(text) <= _TEXT_MAX else None
        except (SyntaxError, ValueError):
            tree = None
        if tree is None:
            raise self._bad()
        self._evaluate = self._compile(tree.body)
        self(1)

    def __call__(self, counter: int) -> Step:
        """The first step that the checkpoint with this counter needs. `UsageError` if the result is no step."""
        try:
            value = self._evaluate(counter)
        except ZeroDivisionError:
            raise self._bad() from None
        if not 0 <= value <= INTEGER_MAX:
            raise UsageError(f"--next-step {self.text!r} makes {value} of checkpoint {counter}, which is no step")
        return Step(value)

    def _compile(self, node: ast.expr) -> Callable[[int], int]:
        match node:
            case ast.Name(id="N"):
                return lambda counter: counter
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return lambda _: number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                one, two, combine = self._compile(left), self._compile(right), _OPERATORS[type(op)]
                return lambda counter: combine(one(counter), two(counter))
            case _:
                raise self._bad()

    def _bad(self) -> UsageError:
        return UsageError(f"--next-step {self.text!r}: write an expression of N such as N, N+1 or N*4")
