"""The base of all parts of a plan: frozen, no unknown keys, and errors with advice."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError

from stepfs_producer.plan.file.problems import Problem, nearest

OF_KEY = "of_key"  # error type of problems that are about a key
_OF_VALUE = "of_value"


class Part(BaseModel):
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
        """As YAML writes them."""
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
