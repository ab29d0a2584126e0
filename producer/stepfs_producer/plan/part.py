"""The mappings of a plan: dataclasses that check their settings when they are made, from Python as from a plan file.

A key is declared once: its type says how it is parsed, its docstring what it means, `Key` what else there is to it. Read at
a part's first use, so that a worker that gets parts does not parse types. Rejected: pydantic, which reads no more of a plan
than the hundred lines below, and costs each process 0.4 s and 10 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from inspect import Parameter, Signature
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from stepfs_producer.plan.values import Parse, Parsed, PlanError, Problem, Where, choice, nearest, path_text

_keys: dict[type[Part], tuple[Declared, ...]] = {}  # of the parts that were asked for


@dataclass(frozen=True, slots=True)
class Key:
    """Marks a field's type: what a key is beside its value."""

    spelled: str | None = None  # in plan files, if Python has the word for itself
    policy: bool = False  # changes no record and no sample of a source, so it is no part of its identity
    later: bool = False  # came after 0.1.0: says nothing while it is its default, which means what was done before


@dataclass(frozen=True, slots=True)
class Before:
    """Marks a field's type: `change` makes its value of what may be written, which has the type `written`."""

    change: Parse
    written: Any


POLICY: Final = Key(policy=True)


class WrongPartError(ValueError):
    """A part is none, for these reasons."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(f"{len(self.problems)} problems")

    def refusal(self) -> PlanError:
        """The same for callers, who know no places in a file."""
        return PlanError([f"{path_text(where)}: {what}" if where else what for where, what, _ in self.problems])


class Declared(NamedTuple):
    """A key of a part."""

    name: str  # in Python
    spelled: str  # in plan files
    hint: Any  # its type, with marks
    read: Parse
    field: Field[Any]
    policy: bool
    later: bool

    @property
    def required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    def default(self) -> Any:
        return self.field.default if self.field.default_factory is MISSING else self.field.default_factory()


class _AsDeclared:
    """For help(): the keywords of a part."""

    def __get__(self, part: Part | None, kind: type[Part]) -> Signature:
        types = get_type_hints(kind)
        every = [
            Parameter(
                one.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if one.required else one.default(),
                annotation=types[one.name],
            )
            for one in keys_of(kind)
            if one.name not in {first.name for first in kind.leading}
        ]
        return Signature([*kind.leading, *every])


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Part:
    """A mapping of the plan. `PlanError` names all that is wrong with its settings."""

    short: ClassVar[str | None] = None  # the key that a bare word stands for
    example: ClassVar[str] = "{…}"
    refused: ClassVar[Mapping[str, str]] = {}  # keys that get an answer of their own
    said: ClassVar[Mapping[str, str]] = {}  # help of keys of parts above, where this one has better
    leading: ClassVar[tuple[Parameter, ...]] = ()  # what stands before the keywords

    __signature__: ClassVar[Any] = _AsDeclared()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    given: frozenset[str]  # the keys that were set, whatever their values

    def __init_subclass__(cls, *, init: bool = True) -> None:
        del init  # it tells type checkers that an `__init__` is inherited
        super().__init_subclass__()
        dataclass(init=False, repr=False, eq=False, kw_only=True)(cls)  # the rest stands below, once: 5 ms a class else

    def __init__(self, /, **settings: Any) -> None:
        try:
            self._settle(settings)
        except WrongPartError as error:
            raise error.refusal() from None

    @classmethod
    def read(cls, data: object) -> Self:
        """The part of a mapping, or of a bare word. `WrongPartError`."""
        if isinstance(data, cls):
            return data
        if cls.short is not None and isinstance(data, str):
            data = {cls.short: data}
        if not isinstance(data, Mapping):
            raise WrongPartError([Problem((), f"write keys and values, such as {cls.example}")])
        part = cls.__new__(cls)
        part._settle(data)  # noqa: SLF001  (its own)
        return part

    def _settle(self, data: Mapping[Any, Any]) -> None:
        found = {} if data else {one.name: _default(one) for one in fields(self)}
        problems: list[Problem] = []
        given = set()
        if data or MISSING in found.values():
            found, unknown = {}, dict(data)
            for key in keys_of(type(self)):
                written = key.spelled if key.spelled in data else key.name
                if written in data:
                    given.add(key.name)
                    _take(found, key.name, key.read, unknown.pop(written), (written,), problems)
                elif key.required:
                    problems.append(Problem((key.spelled,), f"{key.spelled!r} is missing"))
                else:
                    found[key.name] = key.default()
            problems += map(self._unknown, unknown)
        if not problems:
            self.__dict__.update(found, given=frozenset(given))
        problems += self.problems_beside(data, found) if problems else self.own_problems()
        if problems:
            raise WrongPartError(problems)

    @classmethod
    def _unknown(cls, key: Any) -> Problem:
        what = f"unknown key {str(key)!r}{nearest(str(key), [one.spelled for one in keys_of(cls)])}"
        return Problem((key,), cls.refused.get(key, what), of_key=True)

    def own_problems(self) -> list[Problem]:
        """Problems between fields."""
        return []

    @classmethod
    def problems_beside(cls, data: Mapping[Any, Any], found: Mapping[str, Any]) -> list[Problem]:  # noqa: ARG003
        """The same while a field of `data` is wrong, as far as those that were `found` say."""
        return []

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be set; make another one, by changed()")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"{type(self).__name__}.{name} cannot be deleted")

    def changed(self, **updates: Any) -> Self:
        """The same part with these values, which are not looked at."""
        part = type(self).__new__(type(self))
        part.__dict__.update(self.__dict__, **updates, given=self.given | updates.keys())
        return part

    def _values(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def _news(self) -> dict[str, Any]:
        """The values that are not those by default."""
        every = {one.name: (getattr(self, one.name), _default(one)) for one in fields(self)}
        return {name: value for name, (value, default) in every.items() if value != default}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and type(self) is type(other) and self._values() == other._values()

    def __hash__(self) -> int:
        values = self._values().values()
        return hash((type(self), *(frozenset(one.items()) if isinstance(one, Mapping) else one for one in values)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={one!r}' for name, one in self._news().items())})"

    def __reduce__(self) -> tuple[Callable[..., Part], tuple[object, ...]]:
        return _remade, (type(self), self._news(), tuple(sorted(self.given)))


def _remade(kind: type[Part], news: Mapping[str, Any], given: Iterable[str]) -> Part:
    part = kind.__new__(kind)
    defaults = {one.name: _default(one) for one in fields(kind) if one.name not in news}
    part.__dict__.update(defaults, **news, given=frozenset(given))
    return part


def _default(of: Field[Any]) -> Any:
    """MISSING: it has none."""
    return of.default if of.default_factory is MISSING else of.default_factory()


def keys_of(kind: type[Part]) -> tuple[Declared, ...]:
    """The keys of a part, in the order of their declaration."""
    if kind not in _keys:
        hints = get_type_hints(kind, include_extras=True)
        _keys[kind] = tuple(_declared(one, hints[one.name]) for one in fields(kind))
    return _keys[kind]


def _declared(of: Field[Any], hint: Any) -> Declared:
    marks = [mark for mark in get_args(hint)[1:] if isinstance(mark, Key)] if get_origin(hint) is Annotated else []
    spelled = next((mark.spelled for mark in marks if mark.spelled is not None), of.name)
    policy, later = any(mark.policy for mark in marks), any(mark.later for mark in marks)
    return Declared(of.name, spelled, hint, _reader(hint), of, policy, later)


def _reader(hint: Any) -> Parse:
    """What makes a value of this type, or raises `ValueError`."""
    if isinstance(hint, type) and issubclass(hint, Part):
        return hint.read
    return _as_given if hint is Any else _READERS[get_origin(hint)](*get_args(hint))


def _as_given(value: object) -> object:
    return value


def _marked(hint: Any, *marks: object) -> Parse:
    for mark in marks:
        if isinstance(mark, Parsed):
            return mark.parse
        if isinstance(mark, Before):
            change, read = mark.change, _reader(hint)
            return lambda value: read(change(value))
    return _reader(hint)


def _either(*hints: Any) -> Parse:
    """None, or one of parts; beside None, a single type of any kind."""
    others = [hint for hint in hints if hint is not NoneType]
    reads = [_reader(hint) for hint in others]

    def read(value: object) -> Any:
        if value is None and NoneType in hints:
            return None
        at = next((at for at, hint in enumerate(others) if isinstance(hint, type) and isinstance(value, hint)), 0)
        return reads[at](value)

    return read


def _one_of(*words: str) -> Parse:
    return choice("value", words).parse


def _mapping(_name: Any, hint: Any) -> Parse:
    inner = _reader(hint)

    def read(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError("write keys and values, such as {name: …}")  # noqa: TRY004  (as every wrong value)
        found: dict[str, Any] = {}
        problems = [Problem((str(name),), "a name is text") for name in value if not isinstance(name, str)]
        for name, one in value.items():
            _take(found, name, inner, one, (name,), problems)
        if problems:
            raise WrongPartError(problems)
        return found

    return read


def _sequence(hint: Any, _any_number: Any) -> Parse:
    inner = _reader(hint)

    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError("write a list, such as [a, b]")  # noqa: TRY004
        found: dict[int, Any] = {}
        problems: list[Problem] = []
        for place, one in enumerate(value):
            _take(found, place, inner, one, (place,), problems)
        if problems:
            raise WrongPartError(problems)
        return tuple(found.values())

    return read


def _take(found: dict[Any, Any], name: Any, read: Parse, value: object, at: Where, problems: list[Problem]) -> None:
    """What `read` makes of a value, or its problems."""
    try:
        found[name] = read(value)
    except WrongPartError as error:
        problems += [problem._replace(where=(*at, *problem.where)) for problem in error.problems]
    except ValueError as error:
        problems.append(Problem(at, str(error)))


_READERS: Final[Mapping[Any, Callable[..., Parse]]] = {
    Annotated: _marked, Union: _either, UnionType: _either, Literal: _one_of, dict: _mapping, tuple: _sequence,
}  # fmt: skip
