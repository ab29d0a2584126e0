"""Sources as a plan declares them, one class per format, and the settings that all of them may take from `defaults`.

From Python, the files come first: `Parquet("s3://…", text_field="content")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from stepfs_producer.plan.file.columns import Images
from stepfs_producer.plan.file.part import Part
from stepfs_producer.plan.file.problems import Problem, nearest
from stepfs_producer.plan.file.scalars import (
    NONE,
    Parsed,
    choice,
    decimal,
    file_names,
    or_none,
    parse_shard,
    share,
    shown,
    text,
    user_code,
)
from stepfs_producer.plan.file.settings import Length, OnError, Shuffle
from stepfs_producer.plan.samples import Long

_FIELD: Final = text("name of a field")


def _none_shuffles_nothing(value: object) -> object:
    return None if value == NONE else value


class Defaults(Part):
    """Settings of every source that does not say otherwise."""

    example: ClassVar[str] = "{shuffle: {block: 8MiB}, long: split}"

    shuffle: Annotated[Shuffle | None, BeforeValidator(_none_shuffles_nothing, Shuffle | Literal["none"] | None)] = (
        Shuffle()
    )
    """In which blocks records are shuffled; `none`: as stored."""
    long: Annotated[Long, choice("way", Long)] = Long.SPLIT
    """What becomes of a document longer than a row, or than the sequence_length of its source: split, truncate or drop."""
    epochs: Annotated[Fraction | None, or_none(decimal("number of epochs", above_zero=True))] = None
    """How often the source is read, such as 2.5; `none`: without end."""
    on_error: OnError = OnError()
    """What becomes of records that cannot be decoded."""
    holdout: Annotated[Fraction, share(whole_too=False)] = Field(default_factory=lambda: Fraction(0))
    """Share of the records that only a run with --holdout produces."""
    endpoint_url: Annotated[str, text("URL")] | None = None
    """Of the S3 that holds the files, if it is not that of the lake."""
    profile: Annotated[str, text("name of a profile")] | None = None
    """Of the credentials for it."""


class _Files(Defaults):
    """A source."""

    example: ClassVar[str] = "{format: jsonl, files: /data/web/}"

    files: Annotated[
        tuple[str, ...],
        Parsed(file_names, {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
    ]
    """Files, directories and globs; s3:// URLs of them."""
    shard: Annotated[tuple[int, int], Parsed(parse_shard, {"type": "string"})] | None = None
    """i/n: the i-th of n parts, counted from 0, into which a hash of their bytes deals the records."""
    sequence_length: Length | None = None
    """The most tokens that make one document, if that is less than a row; unless a stage's `lengths` say so."""
    transform: Annotated[str, user_code("function")] | None = None
    """module:function that makes a sample of a whole record."""
    version: Annotated[str, text("version", empty=True)] = ""
    """Of your own code: change it when the code gives other samples."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        # Each class below says so again: type checkers else derive an __init__ from its fields.
        if files:
            settings["files"] = files
        super().__init__(**settings)


class Jsonl(_Files):
    """Files of one JSON object a line."""

    format: Literal["jsonl"] = "jsonl"
    text_field: Annotated[str, _FIELD] = "text"
    """Field of the object that holds the text."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)


class Text(_Files):
    """Files of text."""

    format: Literal["text"] = "text"
    records: Annotated[Literal["lines", "files"], choice("kind of records", ("lines", "files"))] = "lines"
    """lines: each line that is not blank; files: each file, and pieces of about 1 MiB of a longer one."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)


class Parquet(_Files):
    """Parquet files: a record is a row."""

    format: Literal["parquet"] = "parquet"
    text_field: Annotated[str, _FIELD] = "text"
    """Column that holds the text."""
    tokens_field: Annotated[str, _FIELD] | None = None
    """Column of token ids, in place of text."""
    mask_field: Annotated[str, _FIELD] | None = None
    """Column beside the ids: 0 where the loss ignores the token."""
    labels_field: Annotated[str, _FIELD] | None = None
    """Column beside the ids: -100 where the loss ignores the token."""
    images: Images | None = None
    """Columns of encoded images, which the transform gets as patches."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)

    def own_problems(self) -> list[Problem]:
        problems = [
            Problem((name,), f"{name} stands beside token ids; add tokens_field: input_ids, or remove it")
            for name in ("mask_field", "labels_field")
            if getattr(self, name) is not None and self.tokens_field is None
        ]
        if self.mask_field is not None and self.labels_field is not None:
            problems.append(Problem(("labels_field",), "give one of mask_field and labels_field"))
        if self.tokens_field is not None and "text_field" in self.model_fields_set:
            problems.append(Problem(("text_field",), "give one of text_field and tokens_field"))
        if self.tokens_field is not None and self.images is not None:
            problems.append(Problem(("images",), "give one of images and tokens_field"))
        return problems + _images_alone(self.images, self.transform)


class Megatron(_Files):
    """Token ids in pairs of .bin and .idx files."""

    format: Literal["megatron"] = "megatron"

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)


class Source(_Files):
    """A format of your own: `module:Class`."""

    format: Annotated[str, user_code("class")]
    """The class that reads it."""
    text_field: Annotated[str, _FIELD] = "text"
    """For the class."""
    options: dict[str, Annotated[str, text("option", empty=True)]] = Field(default_factory=dict)
    """For the class, as text."""
    images: Images | None = None
    """Fields of encoded images, which the transform gets as patches."""

    def __init__(self, /, *files: str, **settings: Any) -> None:
        super().__init__(*files, **settings)

    def own_problems(self) -> list[Problem]:
        return _images_alone(self.images, self.transform)


def _images_alone(images: Images | None, transform: str | None) -> list[Problem]:
    if images is None or transform is not None:
        return []
    return [Problem(("images",), "images need a transform to put them into a sample; add transform: module:function")]


_FORMATS: Final[Mapping[str, type[_Files]]] = {
    "jsonl": Jsonl,
    "text": Text,
    "parquet": Parquet,
    "megatron": Megatron,
}


def _refuse_format(value: object) -> str:
    known = nearest(value if isinstance(value, str) else "", _FORMATS)
    raise ValueError(f"unknown format {shown(value)}{known}")


class _Unknown(_Files):
    """A source without a known format: its other settings are looked at all the same."""

    format: Annotated[str, Parsed(_refuse_format, {})]
    records: Any = None
    text_field: Any = None
    tokens_field: Any = None
    mask_field: Any = None
    labels_field: Any = None
    options: Any = None
    images: Any = None


def _of_its_format(value: object) -> object:
    if not isinstance(value, Mapping):
        return value if isinstance(value, _Files) else Jsonl.model_validate(value)
    kind = value.get("format")
    if isinstance(kind, str) and ":" in kind:
        return Source.model_validate(value)
    if isinstance(kind, str) and kind in _FORMATS:
        return _FORMATS[kind].model_validate(value)
    return _Unknown.model_validate(value)


AnySource = Annotated[Jsonl | Text | Parquet | Megatron | Source, BeforeValidator(_of_its_format)]
