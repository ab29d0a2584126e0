"""The values of a plan: single ones, mappings of them, and problems with advice.

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
from typing import Any, ClassVar, Final, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, core_schema

from stepfs.errors import UsageError

Where = tuple[str | int, ...]  # keys and indices from the top of the plan

NONE: Final = "none"
_WHOLE: Final = re.compile(r"\d+(_\d+)*", re.ASCII)
_DECIMAL: Final = re.compile(r"\d{1,18}(\.\d{0,18})?|\.\d{1,18}", re.ASCII)
_SIZE: Final = re.compile(r"(\d+(?:_\d+)*) ?(B|KiB|MiB|GiB)?", re.ASCII)
_CALL: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_UNITS: Final = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ONE: Final = 10**18  # decimals have as many places at most
_DIGITS_MAX: Final = 20
_TEXT_MAX: Final = 4096

Parse = Callable[[object], Any]
OF_KEY = "of_key"  # error type of problems that are about a key
_OF_VALUE = "of_value"


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

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.parse)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.schema)


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
    """Bytes: a number with B, KiB, MiB or GiB."""

    def parse(value: object) -> int:
        number = value if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(value, str) and len(value) <= _DIGITS_MAX and (match := _SIZE.fullmatch(value)):
            number = int(match[1]) * _UNITS[match[2]]
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
            raise ValueError(f"{shown(value)} is no {what}; write text")  # noqa: TRY004  (pydantic collects ValueError)
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


def file_names(value: object) -> tuple[str, ...]:
    """One name or several: files, directories, globs, s3:// URLs of them."""
    names = [value] if isinstance(value, str) else value
    one = text("file name").parse
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"{shown(value)} names no files; write a name or a list of names")
    return tuple(one(name) for name in names)


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


class PlanModel(BaseModel):
    """A mapping of the plan."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )
    short: ClassVar[str | None] = None  # the key that a bare word stands for
    example: ClassVar[str] = "{…}"
    refused: ClassVar[Mapping[str, str]] = {}  # keys that get an answer of their own

    @model_validator(mode="wrap")
    @classmethod
    def _all_at_once(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if cls.short is not None and isinstance(data, str):
            data = {cls.short: data}
        wrong: list[InitErrorDetails] = []
        part: Self | None = None
        try:
            part = handler(data)
        except ValidationError as error:
            wrong = [cls._reworded(details) for details in error.errors()]
        further = cls.problems_beside(data) if part is None else part.own_problems()
        wrong += map(_details, further)
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong) from None
        assert part is not None
        return part

    def own_problems(self) -> list[Problem]:
        """Problems between fields."""
        return []

    @classmethod
    def problems_beside(cls, data: object) -> list[Problem]:  # noqa: ARG003
        """The same while a field of `data` is wrong, as far as it can be known."""
        return []

    @classmethod
    def known_keys(cls) -> list[str]:
        """The known keys, as YAML writes them."""
        return [str(field.validation_alias or name) for name, field in cls.model_fields.items()]

    @classmethod
    def parsed_alone(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `data` that can be parsed, also beside wrong ones; those that are absent have their default."""
        found: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            key = str(field.validation_alias or name)
            if key not in data:
                if not field.is_required():
                    found[name] = field.get_default(call_default_factory=True, validated_data={})
                continue
            with suppress(ValidationError):
                found[name] = TypeAdapter(field.rebuild_annotation()).validate_python(data[key])
        return found

    @classmethod
    def _reworded(cls, details: ErrorDetails) -> InitErrorDetails:
        where, kind = details["loc"], details["type"]
        if kind == "extra_forbidden" and len(where) == 1:
            key = str(where[0])
            what = cls.refused.get(key) or f"unknown key {key!r}{nearest(key, cls.known_keys())}"
            return _details(Problem(where, what, of_key=True))
        what = {
            "missing": f"{where[-1] if where else cls.__name__!r} is missing",
            "model_type": f"write keys and values, such as {cls.example}",
            "dict_type": "write keys and values, such as {name: …}",
            "tuple_type": "write a list, such as [a, b]",
            "value_error": str(details.get("ctx", {}).get("error", "")),
        }.get(kind, details["msg"])
        return _details(Problem(where, what, of_key=kind == OF_KEY))

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        found = handler(schema)
        if cls.short is None:
            return found
        inner = handler.resolve_ref_schema(found)
        word = inner["properties"][cls.short]
        return {"anyOf": [dict(inner), {key: word[key] for key in word if key != "default"}]}


def _details(problem: Problem) -> InitErrorDetails:
    kind = PydanticCustomError(OF_KEY if problem.of_key else _OF_VALUE, "{what}", {"what": problem.what})
    return InitErrorDetails(type=kind, loc=problem.where, input=None)
