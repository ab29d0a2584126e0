"""The text pipeline: a corpus and a position → the remaining steps, each with the position after it.

The position is a small map of facts that cannot be recomputed: the place in the stream, and the stream's identity.
Resuming a producer id with another shard, tokenizer or field of JSON records would publish other records under the
name of these, so it is refused. Another sequence length or batch size would continue the same stream of tokens, but a
loader could not stack its rows with those before: that, and what the lake's other producers have done, is refused in
`beginning`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepfs.command_hint import command
from stepfs.errors import RefusedError, UsageError
from stepfs_producer.payloads.encode import encoder_for
from stepfs_producer.text.construct import construct
from stepfs_producer.text.finished import FinishedFiles
from stepfs_producer.text.pack import Cursor, pack
from stepfs_producer.text.records import Place, Shard, TextSource
from stepfs_producer.transforms.tokenize import Tokenizer


@dataclass(frozen=True, slots=True)
class TextPosition:
    """The place of a producer, and its published totals since its first start."""

    shard: Shard
    tokenizer: str  # identity
    cursor: Cursor | None = None  # None: at the beginning
    head: str = ""  # of the file at the cursor, see `TextSource.head`; "" if an older version wrote it
    shape: tuple[int, int] | None = None  # rows per slice, tokens per row; None if an older version wrote it
    finished: bytes = b""  # `FinishedFiles.packed`
    before: int | None = None  # files passed before the one at the cursor; None if an older version wrote it
    text_field: str | None = (
        None  # of its .jsonl files; None while it has none, or if an older version wrote it
    )
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    documents: int = 0
    source_bytes: int = 0

    def value(self) -> dict[str, object]:
        """As a msgpack map, for `Producer.append`."""
        at = None
        if self.cursor is not None:
            place = self.cursor.place
            at = [place.name, place.offset, place.lines, self.cursor.taken]
        shape = {} if self.shape is None else {"shape": list(self.shape)}
        finished = {"finished": self.finished} if self.finished else {}
        before = {} if self.before is None else {"before": self.before}
        text_field = {} if self.text_field is None else {"text_field": self.text_field}
        return {
            "pipeline": "text",
            "shard": [self.shard.index, self.shard.count],
            "tokenizer": self.tokenizer,
            "at": at,
            "head": self.head,
            "steps": self.steps,
            "rows": self.rows,
            "tokens": self.tokens,
            "documents": self.documents,
            "source_bytes": self.source_bytes,
            **shape,
            **finished,
            **before,
            **text_field,
        }


def read_position(value: object, *, shard: Shard, tokenizer: str) -> TextPosition:
    """What `Producer.position` gave back; None is the beginning. `RefusedError` if it belongs to another stream."""
    if value is None:
        return TextPosition(shard, tokenizer)
    if not isinstance(value, Mapping) or value.get("pipeline") != "text":
        raise RefusedError("this producer id was used by another pipeline; choose another --producer-id")
    try:
        position = parse_position(value)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise RefusedError(
            "the position of this producer id is of another version; choose another --producer-id"
        ) from error
    if position.shard != shard:
        was = f"{position.shard.index}/{position.shard.count}"
        raise RefusedError(
            f"this producer id has produced shard {was}; continue it with --shard {was}, "
            "or choose another --producer-id"
        )
    if position.tokenizer != tokenizer:
        raise RefusedError(
            f"this producer id has produced tokens of {position.tokenizer}, not {tokenizer}; "
            "continue with that tokenizer, or choose another --producer-id"
        )
    return position


def parse_position(value: Mapping[str, object]) -> TextPosition:
    """A text position as stored. `KeyError`, `TypeError`, `ValueError` or `UsageError` if it is none."""
    fields: Mapping[str, Any] = value
    index, count = fields["shard"]
    name, offset, lines, taken = fields["at"]
    shape = fields.get("shape")
    if shape is not None:
        rows, seq_len = map(int, shape)
        shape = (rows, seq_len)
    return TextPosition(
        Shard(int(index), int(count)),
        str(fields["tokenizer"]),
        Cursor(Place(str(name), int(offset), int(lines)), int(taken)),
        str(fields.get("head", "")),
        shape,
        bytes(fields.get("finished", b"")),
        None if fields.get("before") is None else int(fields["before"]),
        None if fields.get("text_field") is None else str(fields["text_field"]),
        **{key: int(fields[key]) for key in ("steps", "rows", "tokens", "documents", "source_bytes")},
    )


def resume(value: object, source: TextSource, *, shard: Shard, tokenizer: str) -> TextPosition:
    """`read_position`, checked against this source; `RefusedError` also if the source is another one."""
    position = read_position(value, shard=shard, tokenizer=tokenizer)
    was, field = position.text_field, source.text_field
    if was is not None and field is not None and field != was:
        raise RefusedError(
            f"this producer id has read the field {was!r} of .jsonl records, not {field!r}; continue with "
            f"{command('--text-field', was)}, or choose another --producer-id"
        )
    if position.cursor is not None:
        source.check(position.cursor.place, position.head)
    return position


@dataclass(frozen=True, slots=True)
class TextStep:
    """One step, ready to append."""

    payloads: list[bytes]
    position: TextPosition  # after it
    records: list[int]  # per slice: rows that hold at least one token
    padding: int  # tokens of padding; only the last step has any


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step looks like."""

    slices: int
    rows_per_slice: int
    seq_len: int
    ext: str


def late_files(source: TextSource, position: TextPosition) -> int:
    """How many files were added to the source before the one at `position`: they are not read. Less those removed."""
    if position.cursor is None or position.before is None:
        return 0
    return source.file_number(position.cursor.place.name) - position.before


def text_steps(
    source: TextSource, tokenizer: Tokenizer, shape: Shape, start: TextPosition
) -> Iterator[TextStep]:
    """The steps that follow `start`. The last one is padded, so that no byte of the source is left out."""
    encode = encoder_for(shape.ext, vocabulary=tokenizer.vocabulary)
    stream = f"{start.shard.index}-of-{start.shard.count}"
    position = start
    count = shape.slices * shape.rows_per_slice
    source.finished = FinishedFiles(start.finished)
    late = late_files(source, start)
    records = source.records(start.cursor.place if start.cursor is not None else None)
    for rows in pack(records, tokenizer, rows=count, seq_len=shape.seq_len, start=start.cursor):
        batches = construct(rows, slices=shape.slices, stream=stream, first_row=position.rows)
        position = replace(
            position,
            cursor=rows.cursor,
            head=source.head(rows.cursor.place),
            shape=(shape.rows_per_slice, shape.seq_len),
            finished=source.finished.packed(),
            before=source.file_number(rows.cursor.place.name) - late,
            text_field=position.text_field if source.text_field is None else source.text_field,
            steps=position.steps + 1,
            rows=position.rows + count,
            tokens=position.tokens + rows.tokens,
            documents=position.documents + rows.documents,
            source_bytes=position.source_bytes + rows.source_bytes,
        )
        filled = -(-rows.tokens // shape.seq_len)
        yield TextStep(
            [encode(batch) for batch in batches],
            position,
            [
                min(max(filled - first, 0), shape.rows_per_slice)
                for first in range(0, count, shape.rows_per_slice)
            ],
            padding=count * shape.seq_len - rows.tokens,
        )
