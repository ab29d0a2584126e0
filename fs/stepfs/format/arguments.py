"""Checks of arguments: a wrong type or a size that is none is reported at the call, not deep inside.

Integers may be of any type with `__index__` (`numpy.int64`, a 0-dimensional tensor): training loops count in those.
"""

import operator
import re
from collections.abc import Mapping
from typing import Final, SupportsIndex, cast

from stepfs.errors import NewerFormatError, UsageError, WrongTypeError

_SIZE: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,3}))?(?:([KMGTPkmgtp])(?:iB?)?)?")
INTERVAL_S_MIN: Final = 0.001
STATE_VERSION: Final = 1  # of what a trainer's checkpoint keeps
_NUMBER: Final = r"([0-9]{1,9}(?:\.[0-9]{1,6})?)"
_DURATION: Final = re.compile("".join(f"(?:{_NUMBER}{unit})?" for unit in ("d", "h", "m", "s", "ms")))
_SECONDS: Final = (86400.0, 3600.0, 60.0, 1.0, 0.001)
_SHIFTS: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}


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


def parse_log_format(text: str) -> str:
    """`text` or `json`."""
    if text not in {"text", "json"}:
        raise UsageError(f"log format {text!r}: write text or json")
    return text


def parse_size(text: str) -> int:
    """`8G`, `8Gi`, `8GiB`: bytes; K, M, G, T, P are powers of 1024. `8GB` is refused: it is fewer bytes elsewhere."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"size {text!r}: write a number and K, M, G, T or P, for example 8G, which is 8GiB")
    thousandths = int(match[1]) * 1000 + int((match[2] or "0").ljust(3, "0"))
    return (thousandths << _SHIFTS[(match[3] or "").upper()]) // 1000


def parse_duration(text: str) -> float:
    """`100ms`, `5s`, `1h30m`, `7d`, or a bare number of seconds → seconds."""
    text = text.strip()
    if re.fullmatch(_NUMBER, text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise UsageError(f"duration {text!r}: write seconds, or numbers with d, h, m, s or ms, for example 1h30m")
    return sum(float(number) * seconds for number, seconds in zip(match.groups(), _SECONDS, strict=True) if number)


def parse_interval(text: str) -> float:
    """The interval of a repeated action: at least a millisecond."""
    interval_s = parse_duration(text)
    if interval_s < INTERVAL_S_MIN:
        raise UsageError(f"interval {text!r} is too short: use at least 1ms")
    return interval_s


def check_state_version(state: Mapping[str, object]) -> None:
    """`NewerFormatError` for a state in a checkpoint that a later version has written otherwise."""
    if (version := state.get("version", STATE_VERSION)) != STATE_VERSION:
        raise NewerFormatError(
            f"the checkpoint's state is of version {version!r}, this stepfs reads {STATE_VERSION}; upgrade stepfs"
        )
