"""Records → samples: decode, call the user's function, tokenise. A pure function of each record and its key."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stepfs.errors import UsageError
from stepfs_producer.payloads.step import Columns, SampleGroup, columns_of, rows_of
from stepfs_producer.plan.arrays import Ids, Integers, Mask
from stepfs_producer.plan.order import record_key
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.samples import BAD, EXCLUDED, Heads
from stepfs_producer.sources.record import ID_BYTES, Kind, Records, unpacked
from stepfs_producer.transforms.documents import (
    Documents,
    Encoded,
    Tokenised,
    TransformSpec,
    UnfitRecordError,
    documents_of,
    without_nulls,
)
from stepfs_producer.transforms.fim import FimTransform
from stepfs_producer.transforms.images import with_images
from stepfs_producer.transforms.pairs import Pairs
from stepfs_producer.transforms.tokenizer import Tokenizer, load_tokenizer
from stepfs_producer.transforms.user_function import UserFunction, checked_ids, user_function

_REASON_CHARACTERS_MAX: Final = 300
_UTF8_BYTES_MAX: Final = 4  # of a character
_NOTHING: Final = Encoded(np.empty(0, np.int32), None)
_PADDED: Final = ("arrow", "parquet")  # formats in which each object of a column has the keys of all


def timed_transform(spec: TransformSpec, seed: int, epoch: int, name: str, records: Records) -> tuple[Tokenised, float]:
    """`transform`, and its seconds without the loading of tokenizers. A record's key is made only for what draws by it."""
    load_tokenizer(spec.tokenizer)
    began = time.perf_counter()
    keys = [b""] * len(records)
    if spec.source.transform is not None or spec.source.fim is not None:
        keys = [
            record_key(seed, epoch, name, file, offset)
            for file, offset in zip(records.files.tolist(), records.offsets.tolist(), strict=True)
        ]
    return transform(spec, records, keys), time.perf_counter() - began


def transform(spec: TransformSpec, records: Records, keys: Sequence[bytes]) -> Tokenised:
    """Samples of consecutive records; `keys` are the records' own, one each.

    A record whose content gives no sample is bad, with the reason. `UsageError`, `AbsentError`,
    `RefusedError` if the tokenizer or the function cannot be used; `StepfsError` if the function met an error that
    is not the record's.
    """
    assert len(keys) == len(records)
    tokenizer = load_tokenizer(spec.tokenizer)
    work = _Work(records, tokenizer, spec)
    for index in np.flatnonzero(~records.dropped).tolist():
        if index not in work.bad:
            try:
                work.take(index, keys[index])
            except UnfitRecordError as error:
                work.bad[index] = str(error)[:_REASON_CHARACTERS_MAX]
    return work.tokenised()


class _Work:
    """Records on their way: texts are collected, because tokenizers are fastest in batches."""

    def __init__(self, records: Records, tokenizer: Tokenizer, spec: TransformSpec) -> None:
        self.bad = {index: why for index, why in records.bad.items() if not records.dropped[index]}
        self._records = records
        self._tokenizer = tokenizer
        self._spec = spec
        source = spec.source
        self._call: UserFunction | None = None if source.transform is None else user_function(source.transform)
        self._encode = encoder_of(spec, tokenizer)
        self._fim = None if source.fim is None else FimTransform(source.fim, tokenizer, spec.tokens_max)
        self._plain: list[int] = []
        self._texts: dict[int, str] = {}
        self._found: dict[int, Encoded] = {}
        self._columns: dict[int, Mapping[str, NDArray[Any]]] = {}
        self._data, self._ends = records.data.values.data, [*records.data.ends.tolist(), 0]
        self._read: Callable[[int, bytes], object] = {
            Kind.TEXT: self._read_text,
            Kind.JSON: self._read_object,
            Kind.FIELDS: self._read_object,
            Kind.TOKENS: self._read_tokens,
        }[records.kind]

    def take(self, index: int, key: bytes) -> None:
        """`UnfitRecordError` if the content of the record gives no sample."""
        left = 0 if self._fim is None else self._fim.left
        self._take(index, key)
        if self._fim is not None and self._fim.left > left:
            self._plain.append(index)

    def _take(self, index: int, key: bytes) -> None:
        value = self._read(index, bytes(self._data[self._ends[index - 1] : self._ends[index]]))
        if self._encode is not None:
            self._found[index] = found = self._encode(value)
            self._columns[index] = found.columns
            return
        if self._call is not None:
            made = self._call(value, key, self._tokenizer.vocabulary, self._spec.columns)
            if made is None:
                return
            self._columns[index] = made.columns
            if isinstance(made.content, str):
                value = _encodable(made.content, self._call.name)
            else:
                self._take_ids(index, key, made.content, made.mask)
                return
        if isinstance(value, str):
            text = self._short(value)
            moved = None if self._fim is None else self._fim.of_text(text, key)
            if moved is None:
                self._texts[index] = text
            else:
                self._found[index] = Encoded(moved, None)
        elif isinstance(value, np.ndarray):
            self._take_ids(index, key, value, self._mask_of(index))
        else:
            raise UsageError("whole records need a transform, which makes text or token ids of them")

    def _take_ids(self, index: int, key: bytes, ids: Ids, mask: Mask | None) -> None:
        self._found[index] = Encoded(*((ids, mask) if self._fim is None else self._fim.of_ids(ids, mask, key)))

    def _short(self, text: str) -> str:
        most = self._tokenizer.text_bytes_max
        if len(text) > most // _UTF8_BYTES_MAX and (size := len(text.encode())) > most:
            raise UnfitRecordError(f"a text of {size} bytes; this tokenizer takes at most {most}")
        return text

    def tokenised(self) -> Tokenised:
        documents = self._documents()
        closed = documents  # the ends of chats and pairs are there
        if self._encode is None:
            closed = documents.closed(self._tokenizer.bos, self._tokenizer.eos)
        tokens = closed.ids.lengths
        columns = self._beside(tokens)
        tokens[list(self.bad)] = BAD
        tokens[list(self._records.excluded)] = EXCLUDED
        mask = None if closed.mask is None or closed.mask.all() else closed.mask
        sides = None if self._spec.source.pair is None else np.ones(len(tokens), np.int64)
        if sides is not None:
            sides[[index for index, one in self._found.items() if one.rejected]] = 2
        plain = None
        if left := [index for index in self._plain if index not in self.bad]:
            plain = np.zeros(len(tokens), np.bool_)
            plain[left] = True
        several = self._several()
        records = self._records
        return Tokenised(
            Heads(tokens, rows_of(columns) if columns else None, several, plain),
            SampleGroup(closed.ids, mask, records.files, records.offsets, columns, several, sides, records.tags),
            dict(sorted(self.bad.items())),
        )

    def _several(self) -> Ragged | None:
        """See `Heads.documents`."""
        if not any(one.documents for one in self._found.values()):
            return None
        found = (self._found.get(index, _NOTHING).documents for index in range(len(self._records)))
        return Ragged.of([np.array(ends, np.int64) for ends in found], np.zeros(0, np.int64))

    def _beside(self, lengths: Integers) -> Columns:
        """The columns of the samples; a record that is none has no row."""
        if not self._spec.columns:
            return ()
        given = [self._columns.get(index, {}) if length > 0 else {} for index, length in enumerate(lengths)]
        return columns_of(self._spec.columns, given)

    def _encoded(self) -> Documents:
        try:
            return self._tokenizer.encode_plain(list(self._texts.values()))
        except UnfitRecordError:  # find the text
            for index, text in list(self._texts.items()):
                try:
                    self._tokenizer.encode_plain([text])
                except UnfitRecordError as error:
                    self.bad[index] = str(error)[:_REASON_CHARACTERS_MAX]
                    del self._texts[index]
            return self._tokenizer.encode_plain(list(self._texts.values()))

    def _documents(self) -> Documents:
        """Of each record the one that it is."""
        plain = self._encoded().ids
        if not self._found:
            lengths = np.zeros(len(self._records), np.int64)
            lengths[list(self._texts)] = plain.lengths
            return Documents(Ragged(plain.values, np.cumsum(lengths)))
        found = self._found | {index: Encoded(ids, None) for index, ids in zip(self._texts, plain, strict=True)}
        pieces = [found.get(index, _NOTHING) for index in range(len(self._records))]
        return documents_of([one.ids for one in pieces], [one.mask for one in pieces])

    def _read_text(self, _index: int, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise UnfitRecordError(f"not UTF-8 at byte {error.start}") from error

    def _read_object(self, _index: int, data: bytes) -> object:
        if self._call is None and self._encode is None:
            return None
        try:
            value = json.loads(data) if self._records.kind is Kind.JSON else unpacked(data)
        except (ValueError, RecursionError) as error:
            raise UnfitRecordError(f"not JSON ({error})") from error
        if self._encode is not None and self._spec.source.format in _PADDED:
            value = without_nulls(value)
        images = self._spec.source.images
        return value if images is None else with_images(value, images, of_chat=self._encode is not None)

    def _read_tokens(self, index: int, data: bytes) -> object:
        ids = checked_ids(np.frombuffer(data, "<i4"), self._tokenizer.vocabulary)
        mask = self._mask_of(index)
        return ids if self._call is None or mask is None else {"input_ids": ids, "loss_mask": mask}

    def _mask_of(self, index: int) -> Mask | None:
        if self._records.mask is None:
            return None
        mask = self._records.mask[self._ends[index - 1] // ID_BYTES : self._ends[index] // ID_BYTES]
        return np.asarray(mask != 0, np.uint8)


def open_transform(spec: TransformSpec, tokenizer: Tokenizer) -> tuple[object, ...]:
    """What a worker opens for a source. `UsageError` if its settings do not fit the tokenizer, which is no record's fault."""
    fim = spec.source.fim
    return encoder_of(spec, tokenizer), None if fim is None else FimTransform(fim, tokenizer, spec.tokens_max)


def encoder_of(spec: TransformSpec, tokenizer: Tokenizer) -> Callable[[object], Encoded] | None:
    """The encoder of whole records, where no function makes texts of them; None if there is none. `UsageError`: its settings
    do not fit the tokenizer.
    """
    found = None
    if spec.chat is not None:
        from stepfs_producer.transforms.chat import chats  # noqa: PLC0415 - jinja2 is optional

        found = chats(spec.chat, spec.tokenizer)
    if spec.source.pair is not None:
        return Pairs(spec.source.pair, tokenizer, found).encode
    return None if found is None else found.encode


def _encodable(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnfitRecordError(f"{name} returned text with half a character (a lone surrogate)") from error
    return text
