"""The sources of a plan, its tokenizer and columns, and how records become samples. Workers get these very parts.

From Python, the files of a source come first: `Parquet("s3://…", text_field="content")`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from inspect import Parameter
from typing import Annotated, Any, ClassVar, Final, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.plan.part import POLICY, Before, Key, Part
from stepfs_producer.plan.values import (
    A_LIST,
    NONE,
    Parsed,
    Problem,
    Shard,
    choice,
    decimal,
    file_names,
    names,
    nearest,
    or_none,
    parse_shard,
    share,
    shown,
    size,
    text,
    tokenizer_kind,
    user_code,
    whole,
)

DTYPES: Final = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip
_DIMENSIONS_MAX: Final = 8
_ROW_BYTES_MAX: Final = 16 << 20
_BYTES: Final = "bytes"
BLOCK_BYTES: Final = 8 << 20
PIXELS: Final = "pixels"  # the column of a chat's images
LENGTH_MAX: Final = 1 << 24
_HALF: Final = Fraction(1, 2)
_FIELD: Final = text("name of a field")
VARIABLES: Final = "chat_template_kwargs"  # the field of a record's own variables of its template, as trl names it
_TABLES: Final = ("arrow", "csv", "json", "webdataset")
_NUMBER: Final = re.compile(r"-?(0|[1-9]\d{0,14})(\.\d{1,15})?", re.ASCII)

Length = Annotated[int, whole(1, LENGTH_MAX)]


def _mark(value: object) -> str:
    if isinstance(value, str) and len(value) == 1 and value not in '"\r\n':
        return value
    raise ValueError(f'{shown(value)} is no delimiter; write one character, such as ";" or "\\t"')


def _sizes(value: object) -> tuple[int, ...]:
    one = whole(1, _ROW_BYTES_MAX).parse
    if not isinstance(value, list | tuple) or len(value) > _DIMENSIONS_MAX:
        raise ValueError(f"{shown(value)} is no shape; write at most {_DIMENSIONS_MAX} sizes, such as [588]")
    return tuple(one(size) for size in value)


class Column(Part):
    """An array that samples carry beside their tokens."""

    example: ClassVar[str] = "{dtype: uint8, shape: [588]}"

    dtype: Annotated[str, choice("dtype", DTYPES)]
    """Of numpy."""
    shape: Annotated[tuple[int, ...], Parsed(_sizes, A_LIST)]
    """Of one row; a sample has any number of rows."""
    file: Annotated[Literal["rank", "own"], choice("place", ("rank", "own")), POLICY] = "rank"
    """rank: in the rank's file; own: in a file beside it, which is fetched only where it is opened."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def none(self) -> NDArray[Any]:
        """No row."""
        return np.empty((0, *self.shape), np.dtype(self.dtype).newbyteorder("<"))

    def own_problems(self) -> list[Problem]:
        if self.row_bytes <= _ROW_BYTES_MAX:
            return []
        return [Problem(("shape",), f"a row of {self.row_bytes} bytes; the most is {_ROW_BYTES_MAX}")]


class Long(StrEnum):
    """The treatment of a document that is longer than the sequence length."""

    SPLIT = "split"
    TRUNCATE = "truncate"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class SkipBudget:
    """How many bad records a source may have: a share of all, and a number in a row."""

    at_most: Fraction
    in_a_row: int


class Tokenizer(Part):
    """How text becomes token ids."""

    short: ClassVar[str | None] = "kind"
    example: ClassVar[str] = "{kind: huggingface, file: tokenizer.json}"

    kind: Annotated[Literal["bytes", "huggingface"], tokenizer_kind()] = "bytes"
    """huggingface: a model's own tokenizer.json; bytes: none."""
    file: Annotated[Annotated[str, text("file name")] | None, POLICY] = None
    """Of huggingface."""
    eos: Annotated[str, text("token")] | None = None
    """Token behind each document, by name; `none` for no token."""
    bos: Annotated[str, text("token")] | None = None
    """Token before each document, by name; `none` for no token."""
    pad: Annotated[Annotated[str, text("token")] | None, POLICY] = None
    """Token that fills the last row, by name."""
    chat_template: Annotated[Annotated[str, text("chat template")] | None, POLICY] = None
    """A file, or the template itself; by default that beside the tokenizer's file."""
    control_tokens: Annotated[Literal["text", "tokens"], choice("way", ("text", "tokens"))] | None = None
    """What a control token is that a text or message spells: text (the default), or the token."""

    def own_problems(self) -> list[Problem]:
        if self.kind == _BYTES and self.file is not None:
            return [Problem(("file",), "kind: bytes has no file; remove the file, or choose another kind")]
        if self.kind != _BYTES and self.file is None:
            return [Problem((), f"kind: {self.kind} needs a file; add file: tokenizer.json")]
        return []


def _color(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"{shown(value)} is no color; write [255, 255, 255]")
    return tuple(whole(0, 255).parse(one) for one in value)


class Images(Part):
    """Encoded images in the records' fields, decoded before the transform gets them."""

    short: ClassVar[str | None] = "fields"
    example: ClassVar[str] = "{fields: [jpg, png]}"

    fields: Annotated[tuple[str, ...], names()]
    """Fields that hold a JPEG, PNG, WebP or GIF (its first frame), or a list of them, where a record has the field."""
    patch: Annotated[int, whole(1, 64)] = 14
    """Pixels of a patch's side: it becomes a row of patch × patch × 3 bytes."""
    merge: Annotated[int, whole(1, 8)] = 2
    """Sides of an image are multiples of so many patches, which a model then merges."""
    patches_max: Annotated[int, whole(1, 1 << 16)] = 4096
    """Larger images are made smaller, to at most so many patches."""
    background: Annotated[tuple[int, ...], Parsed(_color, A_LIST)] | None = None
    """Below what is transparent, as [red, green, blue] from 0 to 255; white by default."""
    token: Annotated[str, text("token")] | None = None
    """Of a chat: the token that its template writes for an image, by default <|image_pad|>; it stands for merged patches."""
    patches_min: Annotated[int, whole(1, 1 << 16)] | None = None
    """Of a chat: smaller images are made larger, to at least so many patches."""
    decode: Annotated[Literal["producer", "reader"], choice("place", ("producer", "reader")), Key(later=True)] = (
        "producer"
    )
    """Of a chat. reader: files hold images as they were encoded, and `StepDataset` decodes them."""

    def own_problems(self) -> list[Problem]:
        if self.patches_max < self.merge**2:
            return [Problem(("patches_max",), f"less than the {self.merge**2} patches that are merged")]
        if self.patches_min is not None and self.patches_min > self.patches_max:
            return [Problem(("patches_min",), f"more than the {self.patches_max} of patches_max")]
        return []

    @property
    def placeholder(self) -> str:
        return self.token or "<|image_pad|>"

    @property
    def columns(self) -> dict[str, Column]:
        """What becomes of the images of a chat."""
        pixels = (self.patch * self.patch * 3,)
        return {PIXELS: Column(dtype="uint8", shape=pixels), "grid": Column(dtype="int32", shape=(3,))}

    @property
    def encoded(self) -> dict[str, Column]:
        """The same, beside them, of images that a reader decodes."""
        if self.decode == "producer":
            return {}
        return {"encoded": Column(dtype="uint8", shape=()), "encoded_images": Column(dtype="int32", shape=(6,))}


class Shuffle(Part):
    """Records are shuffled in blocks, and so are the blocks."""

    example: ClassVar[str] = "{block: 8MiB}"

    block: Annotated[int, size(1 << 16, 1 << 30)] = BLOCK_BYTES
    """Bytes of records that are shuffled at a time. A larger block needs more memory."""


class OnError(Part):
    """The treatment of records that cannot be decoded."""

    short: ClassVar[str | None] = "do"
    example: ClassVar[str] = "{do: skip, at_most: 0.1%, in_a_row: 100}"

    do: Annotated[Literal["stop", "skip"], choice("way", ("stop", "skip"))] = "stop"
    """stop at the first one, or skip it."""
    at_most: Annotated[Fraction, share(whole_too=True)] = field(default_factory=lambda: Fraction(1, 1000))
    """Share of the records that may be skipped; 0.1% by default; ten are always allowed."""
    in_a_row: Annotated[int, whole(0, 1 << 31)] = 100
    """How many records may be skipped in a row."""
    file: Annotated[Literal["skip"], choice("way", ("skip",))] | None = None
    """skip: of a damaged file its readable beginning is taken, and the rest counts as one skipped record."""

    def own_problems(self) -> list[Problem]:
        if self.file is None or self.do == "skip":
            return []
        return [Problem(("file",), "the rest of a damaged file counts as a skipped record; add do: skip", of_key=True)]

    @property
    def budget(self) -> SkipBudget | None:
        """None: the first bad record stops the plan."""
        return SkipBudget(self.at_most, self.in_a_row) if self.do == "skip" else None


def _date(value: object) -> str:
    if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", str(value)):
        return str(value)
    raise ValueError(f"{shown(value)} is no date; write it as 2026-01-31")


def _variable(value: object) -> str | int | float | bool | None:
    """Of a template: words of YAML that are no text there, numbers, or text."""
    if not isinstance(value, str):
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(f"{shown(value)} is no variable of a template; write true, false, a number or text")
    words = {"true": True, "false": False, "null": None, NONE: None}
    if value.lower() in words:
        return words[value.lower()]
    return json.loads(value) if _NUMBER.fullmatch(value) else value


class Chat(Part):
    """Conversations in records: rendered by the tokenizer's chat template, learned by turns."""

    short: ClassVar[str | None] = "messages"
    example: ClassVar[str] = "{messages: messages, learn: assistant}"

    messages: Annotated[str, _FIELD] = "messages"
    """Field of the list of messages."""
    role: Annotated[str, _FIELD] = "role"
    """Of a message; `from` in ShareGPT."""
    content: Annotated[str, _FIELD] = "content"
    """Of a message; `value` in ShareGPT."""
    roles: dict[str, Annotated[str, text("role")]] = field(default_factory=dict)
    """The records' own names of roles, such as {human: user, gpt: assistant}."""
    prompt: Annotated[tuple[str, ...], names()] | None = None
    """In place of messages: fields that make the user's turn, such as [instruction, input]."""
    completion: Annotated[str, _FIELD] | None = None
    """Field of the answer to it, such as output."""
    system: Annotated[str, _FIELD] | None = None
    """Field of a system message that comes first."""
    tools: Annotated[str, _FIELD] | None = None
    """Field of the tools that templates get, as a list or as JSON."""
    learn: Annotated[Literal["assistant", "last", "all"], choice("way", ("assistant", "last", "all"))] = "assistant"
    """assistant: what the assistant says, of a prompt and its completion in the completion; last: its last turn; all."""
    train: Annotated[str, _FIELD] | None = None
    """Field of a message that says whether it is learned; by default `train`, `weight`, `loss` and other tools' names."""
    stop: Annotated[tuple[str, ...], names()] | None = None
    """Tokens with which generation stops, where the template writes none behind an answer; the first ends a talk."""
    template: dict[str, Annotated[Any, Parsed(_variable, {"type": ["string", "number", "boolean", "null"]})]] | None = (
        None
    )
    """Variables of the template, such as {enable_thinking: false}; a record's `chat_template_kwargs` come before."""
    date: Annotated[str, Parsed(_date, {"type": "string", "format": "date"})] | None = None
    """The day that templates take for today's."""

    def own_problems(self) -> list[Problem]:
        problems = [
            Problem(("template", name), f"{name} is what the record says; remove it", of_key=True)
            for name in ("messages", "tools", "documents", "add_generation_prompt")
            if name in (self.template or ())
        ]
        if (self.prompt is None) != (self.completion is None):
            missing = "completion" if self.completion is None else "prompt"
            problems.append(Problem((), f"prompt and completion stand together; add {missing}"))
        if self.prompt is not None and self.messages != Chat.messages:
            problems.append(Problem(("messages",), "give one of messages and prompt", of_key=True))
        return problems


class Pair(Part):
    """Preference pairs in records: two documents that stay together; one of an answer with a label. `chat` renders them."""

    short: ClassVar[str | None] = "chosen"
    example: ClassVar[str] = "{prompt: prompt, chosen: chosen, rejected: rejected}"

    prompt: Annotated[str, _FIELD] | None = None
    """Field of the prompt; by default `prompt` where a record has it, else what both answers begin with."""
    chosen: Annotated[str, _FIELD] = "chosen"
    """Field of the answer to be preferred: a text, or messages."""
    rejected: Annotated[str, _FIELD] = "rejected"
    """Field of the other one."""
    label: Annotated[str, _FIELD] | None = None
    """Of answers without another one, as KTO has them: field of true for those to be preferred, and false."""
    completion: Annotated[str, _FIELD] | None = None
    """Field of such an answer; by default `completion`."""

    def own_problems(self) -> list[Problem]:
        if self.label is None and self.completion is not None:
            return [Problem(("completion",), "completion is an answer with a label; add label: label", of_key=True)]
        beside = [name for name in ("chosen", "rejected") if self.label is not None and name in self.given]
        return [Problem((name,), f"give one of label and {name}", of_key=True) for name in beside]

    @property
    def asks_in(self) -> str | None:
        """The field of the prompt that a record must have."""
        return "prompt" if self.prompt is None and self.label is not None else self.prompt

    @property
    def answers_in(self) -> tuple[str, ...]:
        return (self.chosen, self.rejected) if self.label is None else (self.completion or "completion",)


def _fim_tokens(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"{shown(value)} are no three tokens; write [<fim_prefix>, <fim_middle>, <fim_suffix>]")
    return tuple(text("token").parse(one) for one in value)


class Fim(Part):
    """Fill in the middle: documents whose middle comes last."""

    example: ClassVar[str] = "{rate: 0.5, spm: 0.5, tokens: [<fim_prefix>, <fim_middle>, <fim_suffix>]}"

    tokens: Annotated[tuple[str, str, str], Parsed(_fim_tokens, A_LIST)]
    """Before the prefix, the middle and the suffix, by name."""
    rate: Annotated[Fraction, share(whole_too=True)] = field(default_factory=lambda: _HALF)
    """Share of the documents; half by default."""
    spm: Annotated[Fraction, share(whole_too=True)] = field(default_factory=lambda: _HALF)
    """Share of those in which the suffix comes before the prefix; half by default."""
    level: Annotated[Literal["characters", "tokens"], choice("level", ("characters", "tokens"))] = "characters"
    """Where texts are cut: between characters, or between tokens, as token ids always are."""


def _none_shuffles_nothing(value: object) -> object:
    return None if value == NONE else value


class Defaults(Part):
    """Settings of every source that does not say otherwise."""

    example: ClassVar[str] = "{shuffle: {block: 8MiB}, long: split}"

    shuffle: Annotated[Shuffle | None, Before(_none_shuffles_nothing, Shuffle | Literal["none"] | None)] = Shuffle()
    """In which blocks records are shuffled; `none`: as stored."""
    long: Annotated[Long, choice("way", Long), POLICY] = Long.SPLIT
    """What becomes of a document longer than a row, or than the sequence_length of its source: split, truncate or drop. A
    pair, and a chat of which the last turn is learned, is never cut.
    """
    epochs: Annotated[Fraction | None, or_none(decimal("number of epochs", above_zero=True)), POLICY] = None
    """How often the source is read, such as 2.5; `none`: without end."""
    on_error: Annotated[OnError, POLICY] = OnError()
    """What becomes of records that cannot be decoded."""
    holdout: Annotated[Fraction, share(whole_too=False)] = field(default_factory=Fraction)
    """Share of the records that only a run with --holdout produces."""
    endpoint_url: Annotated[Annotated[str, text("URL")] | None, POLICY] = None
    """Of the S3 that holds the files, if it is not that of the lake."""
    profile: Annotated[Annotated[str, text("name of a profile")] | None, POLICY] = None
    """Of the credentials for it."""


def _refuse_format(value: object) -> str:
    known = nearest(value if isinstance(value, str) else "", _FORMATS)
    raise ValueError(f"unknown format {shown(value)}{known}")


class SourceFiles(Defaults):
    """A source."""

    example: ClassVar[str] = "{format: jsonl, files: /data/web/}"
    leading: ClassVar[tuple[Parameter, ...]] = (Parameter("files", Parameter.VAR_POSITIONAL, annotation=str),)
    places: ClassVar[frozenset[str]] = frozenset({"files", "endpoint_url", "profile"})  # where it lies, not what it is

    files: Annotated[tuple[str, ...], file_names(), POLICY]
    """Files, directories and globs; s3://, gs:// and az:// URLs of them, and hf://datasets/OWNER/NAME@REVISION/ of the Hub."""
    shard: Annotated[Shard, Parsed(parse_shard, {"type": "string"})] | None = None
    """i/n: the i-th of n parts, counted from 0, into which a hash of their bytes deals the records."""
    sequence_length: Annotated[Length | None, POLICY] = None
    """The most tokens that make one document, if that is less than a row; unless a stage's `lengths` say so."""
    transform: Annotated[str, user_code("function")] | None = None
    """module:function that makes a sample of a whole record."""
    fim: Fim | None = None
    """Fill in the middle, of each document by itself."""
    version: Annotated[str, text("version", empty=True)] = ""
    """Of your own code: change it when the code gives other samples."""
    format: Annotated[str, Parsed(_refuse_format, {})]

    def __init__(self, /, *files: str, **settings: Any) -> None:
        if files:
            settings["files"] = files
        super().__init__(**settings)

    @property
    def dealt(self) -> Shard:
        """The shard of the records; by default all of them."""
        return self.shard or Shard(0, 1)

    # Below: what only some formats have.

    @property
    def chat(self) -> Chat | None:
        """Its records are conversations."""
        return None

    @property
    def pair(self) -> Pair | None:
        """Its records are pairs."""
        return None

    @property
    def images(self) -> Images | None:
        """Its records hold images."""
        return None

    @property
    def id_fields(self) -> tuple[str, str | None, str | None] | None:
        """Fields of token ids, of their mask and of their labels; None: its records are text, or whole."""
        return None

    @property
    def tag(self) -> str | None:
        """The field of a text that is kept beside the samples."""
        return None

    @property
    def is_of_chats(self) -> bool:
        """Whether a record is a conversation or a pair, which is never cut but between turns."""
        return self.chat is not None or self.pair is not None

    @property
    def is_cut_by_turns(self) -> bool:
        """Whether it may be cut there."""
        return self.chat is not None and self.pair is None and self.images is None and self.chat.learn != "last"

    @property
    def image_columns(self) -> Mapping[str, Column]:
        """The columns that the images of its chats fill."""
        return {} if self.chat is None or self.images is None else self.images.columns

    @property
    def encoded_columns(self) -> Mapping[str, Column]:
        """Those beside them, where a reader decodes the images."""
        return {} if self.chat is None or self.images is None else self.images.encoded

    @property
    def gives_columns(self) -> bool:
        return self.transform is not None or bool(self.image_columns)

    @property
    def takes_whole(self) -> bool:
        """Whether a record is taken with all its fields."""
        return False


class WithText(SourceFiles, init=False):
    """Records with fields, of which one holds text; unless all of them are taken."""

    text_field: Annotated[str, _FIELD] = "text"
    """Field that holds the text."""
    tag: Annotated[Annotated[str, _FIELD] | None, Key(later=True)] = None
    """Field of a text of up to 256 bytes that the files say of each span; a record without one cannot be decoded."""

    @property
    def takes_whole(self) -> bool:
        """For a function, a chat template, or to tell the two answers apart."""
        return self.transform is not None or self.is_of_chats


class WithIds(SourceFiles, init=False):
    """Records that may hold token ids."""

    tokens_field: Annotated[str, _FIELD] | None = None
    """Field of token ids, in place of text."""
    mask_field: Annotated[str, _FIELD] | None = None
    """Field beside the ids: 0 where the loss ignores the token."""
    labels_field: Annotated[str, _FIELD] | None = None
    """Field beside the ids: -100 where the loss ignores the token."""

    @property
    def id_fields(self) -> tuple[str, str | None, str | None] | None:
        """As the source names them."""
        return None if self.tokens_field is None else (self.tokens_field, self.mask_field, self.labels_field)

    def own_problems(self) -> list[Problem]:
        problems = [
            Problem((name,), f"{name} stands beside token ids; add tokens_field: input_ids, or remove it")
            for name in ("mask_field", "labels_field")
            if getattr(self, name) is not None and self.tokens_field is None
        ]
        if self.mask_field is not None and self.labels_field is not None:
            problems.append(Problem(("labels_field",), "give one of mask_field and labels_field"))
        if self.tokens_field is not None and "text_field" in self.given:
            problems.append(Problem(("text_field",), "give one of text_field and tokens_field"))
        return super().own_problems() + problems


class WithImages(SourceFiles, init=False):
    """Records whose fields may hold images."""

    images: Images | None = None
    """Fields of encoded images, which the transform gets as patches; of a chat, those that its messages show."""

    def own_problems(self) -> list[Problem]:
        problems = super().own_problems()
        if self.images is None or self.is_of_chats:
            return problems
        if self.transform is None:
            what = "images need a transform to put them into a sample; add transform: module:function, or a chat that shows them"
            problems.append(Problem(("images",), what))
        problems += [
            Problem(("images", name), f"{name} is of a chat's images; remove it", of_key=True)
            for name in ("token", "patches_min", "decode")
            if getattr(self.images, name) not in (None, "producer")
        ]
        return problems


class WithChats(SourceFiles, init=False):
    """Records that may be conversations, or pairs of answers: then they are nothing else."""

    chat: Chat | None = None
    """In place of text: conversations."""
    pair: Pair | None = None
    """In place of text: pairs of answers, which are text unless `chat` renders them."""

    def own_problems(self) -> list[Problem]:
        given, chat, pair = self.given, self.chat, self.pair
        problems = super().own_problems()
        if not self.is_of_chats:
            return problems
        what = "chat" if pair is None else "pair"
        cut = "long" in given and self.long is not Long.DROP
        problems += [
            Problem((name,), f"give one of {what} and {name}", of_key=True)
            for name in ("text_field", "tokens_field", "transform", "images", "fim")
            if name in given and getattr(self, name) is not None and (what, name) != ("chat", "images")
        ]
        if pair is not None and cut:
            what = "a pair is never cut: pairs longer than a row are dropped and counted; use drop"
            problems.append(Problem(("long",), what))
        if pair is not None and chat is not None:
            problems += [
                Problem(("chat", name), f"the answers of a pair are learned; remove {name}", of_key=True)
                for name in ("messages", "prompt", "completion", "learn")
                if getattr(chat, name) != getattr(Chat, name)
            ]
        elif cut and not self.is_cut_by_turns:
            why = (
                "only the last turn is learned, and cut chats lack it"
                if self.images is None
                else "chats with images are whole"
            )
            problems.append(Problem(("long",), f"{why}; use drop"))
        return problems

    @property
    def chat_fields(self) -> tuple[str, ...] | None:
        """The fields that its chats and pairs need; None: any, for without a name a prompt may be absent."""
        named: tuple[str | None, ...] = ()
        if self.pair is not None:
            if self.pair.asks_in is None:
                return None
            named = (self.pair.asks_in, *self.pair.answers_in, self.pair.label)
        elif self.chat is not None:
            named = (*self.chat.prompt, self.chat.completion) if self.chat.prompt else (self.chat.messages,)
        beside = (
            ()
            if self.chat is None
            else (self.chat.system, self.chat.tools, *(self.images.fields if self.images else ()))
        )
        return tuple(name for name in (*named, *beside) if name is not None)


class Jsonl(WithChats, WithIds, WithText, init=False):
    """Files of one JSON object a line."""

    said: ClassVar[Mapping[str, str]] = {
        "text_field": "Field of the object that holds the text; meta.text: of an object within it.",
    }

    format: Literal["jsonl"] = "jsonl"


class Text(SourceFiles, init=False):
    """Files of text."""

    format: Literal["text"] = "text"
    records: Annotated[Literal["lines", "files"], choice("kind of records", ("lines", "files"))] = "files"
    """Documents. files: each file, and pieces of about 1 MiB of a longer one; lines: each line that is not blank."""


class Parquet(WithChats, WithImages, WithIds, WithText, init=False):
    """Parquet files: a record is a row."""

    said: ClassVar[Mapping[str, str]] = {
        "text_field": "Column that holds the text.",
        "tokens_field": "Column of token ids, in place of text.",
        "mask_field": "Column beside the ids: 0 where the loss ignores the token.",
        "labels_field": "Column beside the ids: -100 where the loss ignores the token.",
        "images": "Columns of encoded images, which the transform gets as patches.",
    }

    format: Literal["parquet"] = "parquet"
    columns: Annotated[tuple[str, ...], names()] | None = None
    """The only columns that are read for the transform; by default all, and for a chat its own."""

    def own_problems(self) -> list[Problem]:
        problems = super().own_problems()
        if self.tokens_field is not None and self.images is not None:
            problems.append(Problem(("images",), "give one of images and tokens_field"))
        if self.columns is not None and self.transform is None:
            problems.append(Problem(("columns",), "columns are a transform's; add transform: module:function"))
        return problems


class Table(WithChats, WithImages, WithText, init=False):
    """Records with fields: Arrow, CSV or TSV, an array of JSON objects, samples of WebDataset."""

    said: ClassVar[Mapping[str, str]] = {
        "text_field": "Field that holds the text; of webdataset the end of a member's name, such as txt.",
    }

    format: Annotated[Literal["arrow", "csv", "json", "webdataset"], choice("format", _TABLES)]
    """Kind of files."""
    delimiter: Annotated[str, Parsed(_mark, {"type": "string", "minLength": 1, "maxLength": 1})] | None = None
    """Of csv: the character between values; by default a tab or a comma, as the first line has them."""

    def own_problems(self) -> list[Problem]:
        problems = super().own_problems()
        if self.delimiter is not None and self.format != "csv":
            problems.append(Problem(("delimiter",), "only csv has a delimiter; remove it", of_key=True))
        return problems


class Megatron(SourceFiles, init=False):
    """Token ids in pairs of .bin and .idx files."""

    format: Literal["megatron"] = "megatron"


class Source(WithChats, WithImages, WithText, init=False):
    """A format of your own: `module:Class`."""

    said: ClassVar[Mapping[str, str]] = {"text_field": "For the class."}

    format: Annotated[str, user_code("class")]
    """The class that reads it."""
    options: dict[str, Annotated[str, text("option", empty=True)]] = field(default_factory=dict)
    """For the class, as text."""


AnyKind = Jsonl | Text | Parquet | Table | Megatron | Source
_FORMATS: Final[Mapping[str, type[SourceFiles]]] = {
    "jsonl": Jsonl,
    "text": Text,
    "parquet": Parquet,
    "megatron": Megatron,
    **dict.fromkeys(_TABLES, Table),
}
_OTHERS: Final = {
    name: Any
    for kind in get_args(AnyKind)
    for name in kind.__dataclass_fields__.keys() - SourceFiles.__dataclass_fields__
}
# Of no known format: the keys that all have are looked at, and those of any one are known.
_Unknown: Final = cast(
    "type[SourceFiles]",
    type(
        "_Unknown",
        (SourceFiles,),
        {"__annotations__": _OTHERS, "__doc__": SourceFiles.__doc__, **dict.fromkeys(_OTHERS)},
    ),
)


def _of_its_format(value: object) -> object:
    if not isinstance(value, Mapping):
        return value if isinstance(value, SourceFiles) else Jsonl.read(value)
    kind = value.get("format")
    if isinstance(kind, str) and ":" in kind:
        return Source.read(value)
    if isinstance(kind, str) and kind in _FORMATS:
        return _FORMATS[kind].read(value)
    return _Unknown.read(value)


AnySource = Annotated[SourceFiles, Before(_of_its_format, AnyKind)]
