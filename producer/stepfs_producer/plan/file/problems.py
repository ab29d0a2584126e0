"""The problems of a plan: all at once, each with its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

from stepfs.errors import UsageError

Where = tuple[str | int, ...]  # keys and indices from the top of the plan


class Problem(NamedTuple):
    """One thing to mend. `what` is a line with the advice."""

    where: Where
    what: str
    of_key: bool = False  # the key itself is wrong, not its value


class PlanError(UsageError):
    """The plan cannot be used. One line per problem; correct them all and try again."""

    several_lines: ClassVar[bool] = True

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(" ".join(line.split("\n")) for line in lines)  # names may hold anything
        head = () if len(lines) == 1 else (f"the plan has {len(lines)} mistakes:",)
        super().__init__("\n".join([*head, *self.lines]))


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'prose'?` if a known word is near; else the known words, if they are few."""
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(words)}" if 0 < len(words) <= 16 else ""


def path_text(where: Where) -> str:
    """`sources.code.files[1]`."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
