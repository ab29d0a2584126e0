"""The single values of a plan, each with its grammar, and problems with advice.

In YAML every scalar arrives as text, and each field parses its own, exactly: no value passes through a float. Python
callers may also give integers, and floats, which count as the decimal that Python prints for them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, ClassVar, Final, NamedTuple

from stepfs.errors import UsageError
from stepfs.format.arguments import parse_size

Where = tuple[str | int, ...]  # keys and indices from the top of the plan

Document = str | tuple[str, str, int]  # SHA-256 of its bytes; or source, file and record, as `lineage` has them

NONE: Final = "none"
_WHOLE: Final = re.compile(r"\d+(_\d+)*", re.ASCII)
_DECIMAL: Final = re.compile(r"\d{1,18}(\.\d{0,18})?|\.\d{1,18}", re.ASCII)
_SIZE: Final = re.compile(r"\d+(_\d+)*(\.\d{1,3})?( ?[KMGTPkmgtp](iB?)?)?", re.ASCII)  # as `parse_size`, and `_`
_CALL: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_ONE: Final = 10**18  # decimals have as many places at most
_DIGITS_MAX: Final = 20
_TEXT_MAX: Final = 4096
DOCUMENTS: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": ["array", "string"]}}]}
A_LIST: Final = {"type": "array", "items": {"type": ["integer", "string"]}}  # in a schema

Parse = Callable[[object], Any]


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


@dataclass(frozen=True, slots=True, eq=False)
class Parsed:
    """Marks a field's type: `parse` makes its value or raises `ValueError`; `schema` describes it for editors."""

    parse: Parse
    schema: Mapping[str, Any]


def whole(least: int, most: int) -> Parsed:
    """A whole number from `least` to `most`."""

    def parse(value: object) -> int:
        number = _integer(value)
        if number is None:
            raise ValueError(f"{shown(value)} is no whole number")
        if not least <= number <= most:
            raise ValueError(f"{number} is out of range; the least is {least}, the most {most}")
        return number

    return Parsed(parse, {"anyOf": [{"type": "integer", "minimum": least, "maximum": most}, _text(_WHOLE)]})


def _integer(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and len(value) <= _DIGITS_MAX and _WHOLE.fullmatch(value):
        return int(value)
    return None


def size(least: int, most: int) -> Parsed:
    """Bytes, as the commands take them: `8M`, `8MiB`."""

    def parse(value: object) -> int:
        number = value if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(value, str) and len(value) <= _DIGITS_MAX and _SIZE.fullmatch(value):
            with suppress(UsageError):  # more digits than a size has
                number = parse_size(value.replace("_", "").replace(" ", ""))
        if number is None:
            raise ValueError(f"{shown(value)} is no size; write a number with KiB, MiB or GiB, such as 8MiB")
        if not least <= number <= most:
            raise ValueError(f"{shown(value)} is out of range; the least is {least} bytes, the most {most}")
        return number

    return Parsed(parse, {"anyOf": [{"type": "integer"}, _text(_SIZE)]})


def _decimal(value: object) -> Fraction | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        value = repr(value)
    if isinstance(value, Fraction):
        return value if value >= 0 and not _ONE % value.denominator else None
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        value = value.replace("_", "")
    return Fraction(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else None


def decimal(what: str, *, above_zero: bool = False) -> Parsed:
    """A decimal number that is not negative."""

    def parse(value: object) -> Fraction:
        number = _decimal(value)
        if number is None or (above_zero and not number):
            least = "above 0" if above_zero else "that is not negative"
            raise ValueError(f"{shown(value)} is no {what}; write a decimal number {least}, such as 2.5")
        return number

    return Parsed(parse, {"anyOf": [{"type": "number", "minimum": 0}, _text(_DECIMAL)]})


def share(*, whole_too: bool) -> Parsed:
    """A part of all: `0.1%` or `0.001`; below 1, or also 1 itself."""

    def parse(value: object) -> Fraction:
        percent = isinstance(value, str) and value.endswith("%")
        number = _decimal(value[:-1].rstrip() if percent and isinstance(value, str) else value)
        if number is not None and percent:
            number /= 100
        if number is None or number > 1 or (number == 1 and not whole_too) or _ONE % number.denominator:
            bound = "at most 100%" if whole_too else "below 100%"
            raise ValueError(f"{shown(value)} is no share; write one {bound}, such as 0.1%")
        return number

    pattern = re.compile(f"({_DECIMAL.pattern}) ?%?")
    return Parsed(parse, {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, _text(pattern)]})


def text(what: str, *, empty: bool = False) -> Parsed:
    """Any text without NUL."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is no {what}; write text")  # noqa: TRY004  (as every wrong value)
        if not value and not empty:
            raise ValueError(f"the {what} is empty; write one, or remove the key")
        if len(value) > _TEXT_MAX or "\0" in value or not _encodable(value):
            raise ValueError(f"{shown(value)} is no {what}; use up to {_TEXT_MAX} characters of UTF-8")
        return value

    return Parsed(parse, {"type": "string", **({} if empty else {"minLength": 1})})


def user_code(what: str) -> Parsed:
    """`module:name` of the user's own code."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not _CALL.fullmatch(value):
            raise ValueError(f"{shown(value)} names no {what}; write module:name, such as my_code:{what}")
        return value

    return Parsed(parse, _text(_CALL))


def choice(what: str, known: Iterable[str] | type[StrEnum]) -> Parsed:
    """One of `known`; the members if it is an enumeration."""
    members = {str(name): name for name in known}

    def parse(value: object) -> str:
        if isinstance(value, str) and value in members:
            return members[value]
        raise ValueError(f"unknown {what} {shown(value)}" + nearest(str(value), members))

    return Parsed(parse, {"enum": list(members)})


def tokenizer_kind() -> Parsed:
    """A `choice` with advice for a file name in its place."""
    known = choice("kind of tokenizer", ("bytes", "huggingface"))

    def parse(value: object) -> object:
        if isinstance(value, str) and value.endswith(".json"):
            raise ValueError(f"{shown(value)} is a file; write {{kind: huggingface, file: {value}}}")
        return known.parse(value)

    return Parsed(parse, known.schema)


def file_names() -> Parsed:
    """One name or several: files, directories, globs, s3:// URLs of them."""
    return _several("file name", "names no files")


def names() -> Parsed:
    """One name or several."""
    return _several("name", "names nothing")


def documents(value: object) -> str | tuple[Document, ...]:
    """The name of a file that names documents, or these, in an order of their own."""
    if not isinstance(value, list | tuple):
        return str(text("file name").parse(value))
    found = {_document(one) for one in value}
    return tuple(sorted(found, key=lambda one: ("", "", 0, one) if isinstance(one, str) else (*one, "")))


def _document(value: object) -> Document:
    if isinstance(value, str) and _SHA256.fullmatch(value):
        return value
    if isinstance(value, list | tuple) and len(value) == 3:
        source, file, record = value
        number = _integer(record)
        if isinstance(source, str) and isinstance(file, str) and number is not None and number >= 0:
            return source, file, number
    raise ValueError(
        f"{shown(value)} names no document; write a SHA-256, or [source, file, record] as lineage shows them"
    )


def _several(what: str, none: str) -> Parsed:
    one = text(what).parse

    def parse(value: object) -> tuple[str, ...]:
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list | tuple) or not found:
            raise ValueError(f"{shown(value)} {none}; write a name or a list of names")
        return tuple(one(name) for name in found)

    return Parsed(parse, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})


class Shard(NamedTuple):
    """Part `number`, counted from 0, of so many."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def parse_shard(value: object) -> Shard:
    """`i/n`: index and count of a shard."""
    index, _, count = value.partition("/") if isinstance(value, str) else ("", "", "")
    if not (_WHOLE.fullmatch(index) and _WHOLE.fullmatch(count) and len(count) <= _DIGITS_MAX):
        raise ValueError(f"{shown(value)} is no shard; write i/n, such as 0/2 and 1/2 for two runs")
    if int(index) >= int(count):
        raise ValueError(f"shard {value} does not exist; the first of {count} is 0/{count}")
    return Shard(int(index), int(count))


def or_none(inner: Parsed) -> Parsed:
    """`none`, or what `inner` parses."""

    def parse(value: object) -> Any:
        return None if value is None or value == NONE else inner.parse(value)

    return Parsed(parse, {"anyOf": [inner.schema, {"enum": [NONE, None]}]})


def shown(value: object) -> str:
    """A wrong value for a message, not longer than a line."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    known = repr(value if len(str(value)) <= 60 else f"{str(value)[:57]}…")
    return known if isinstance(value, str) else known.strip("'")


def decimal_text(number: Fraction) -> str:
    """A decimal as text, exactly; the inverse of parsing."""
    scaled = number * _ONE
    assert scaled.denominator == 1, number
    digits = f"{scaled.numerator:019d}"
    return f"{digits[:-18]}.{digits[-18:]}".rstrip("0").rstrip(".")


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(pattern: re.Pattern[str]) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^({pattern.pattern})$"}
