"""Checks of arguments of the Python API: a wrong type is reported at the call, not deep inside.

Integers may be of any type with `__index__` (`numpy.int64`, a 0-dimensional tensor): training loops count in those.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast

from stepfs.errors import WrongTypeError


def check_text(value: object, what: str, example: str) -> str:
    """`value` if it is text, else `WrongTypeError`."""
    if not isinstance(value, str):
        raise WrongTypeError(f"{what} is a {type(value).__name__}; give text, such as {example!r}")
    return value


def check_integer(value: object, what: str) -> int:
    """`value` as a plain integer, else `WrongTypeError`; True and False are no integers here."""
    try:
        number = operator.index(cast("SupportsIndex", value))
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool):
        raise WrongTypeError(f"{what} is {value!r}, a {type(value).__name__}; give an integer")
    return number
