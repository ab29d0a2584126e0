"""How records become documents: what a run finds for it, and the rule of BOS and EOS.

A document's tokens are opened by BOS and closed by EOS unless they are there already. A BOS or EOS that is added has the
mask of the token beside it: where the last turn of a chat is learned, so is its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepfs_producer.payloads.step import ColumnSpec, SampleGroup
from stepfs_producer.plan.arrays import Ids, Mask
from stepfs_producer.plan.ragged import Ragged, joined_masks
from stepfs_producer.plan.samples import Heads
from stepfs_producer.plan.sources import Chat, Images, SourceFiles, Tokenizer
from stepfs_producer.transforms.model_folder import Templates

_WORDS: Final = {
    "true": True, "yes": True, "1": True, "1.0": True, "": None,
    "false": False, "no": False, "0": False, "0.0": False, "none": None, "null": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """The tokenizer of a run: as the plan has it, with the place of its file from here."""

    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    digest: str | None = None  # SHA-256 of the file, in hex: another content is refused. See `pinned`

    @property
    def file(self) -> str | None:
        """None: its tokens are bytes."""
        return self.tokenizer.file


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """The templates of conversations, as they were read, and their length: see `transforms.chat`."""

    chat: Chat
    templates: Templates
    tokens: tuple[
        tuple[str, str | None], ...
    ] = ()  # bos_token, eos_token, …, as templates know them; None: there is none
    tokens_max: int | None = None  # of a part, if longer ones are cut at turns; None: a longer one is no sample
    truncates: bool = False  # what is behind the first part is lost
    images: Images | None = None  # that its messages show


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """How a record becomes a sample: as its source says, and by what was found for it."""

    source: SourceFiles
    tokenizer: TokenizerSpec = field(default_factory=TokenizerSpec)
    columns: tuple[ColumnSpec, ...] = ()  # that the source's function may give
    chat: ChatSpec | None = None  # of a source of conversations
    tokens_max: int | None = None  # of a row of the shortest stage


class UnfitRecordError(Exception):
    """The content of this record gives no sample; the message has the reason."""


class Encoded(NamedTuple):
    """The tokens of a whole record."""

    ids: Ids
    mask: Mask | None
    documents: Sequence[int] = ()  # see `Heads`
    columns: Mapping[str, NDArray[Any]] = {}
    rejected: bool = False  # an answer by itself, of which the record says that it is a bad one


def field_at(record: Mapping[str, Any], name: str) -> Any:
    """The field of that name; of a name with dots, such as data.messages, the field within a field. None: there is none."""
    found: Any = record
    for part in (name,) if name in record else name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def truth_of(value: object) -> bool | None:
    """Whether a field says yes, also by a word; None: it says nothing. `ValueError`: something else."""
    says = _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value
    if says is None or says in (0, 1):
        return says if says is None else bool(says)
    raise ValueError(f"{value!r}, which is neither true nor false; write one of them")


def without_nulls(value: Any) -> Any:
    """The same without the keys that Arrow gives each object of a column, null where a record had none."""
    if isinstance(value, Mapping):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def is_of_record(error: BaseException) -> bool:
    """Whether a library failed at its input: also by a panic of Rust code, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@dataclass(frozen=True, slots=True)
class Documents:
    """Token ids of documents."""

    ids: Ragged  # int32
    mask: Mask | None = None  # per id: 0 where the loss ignores it

    def closed(self, bos: int | None, eos: int | None) -> Documents:
        """The same documents, each between `bos` and `eos`. None: no such token is added."""
        ids, ends, begins = self.ids.values, self.ids.ends, self.ids.begins
        some = ends > begins
        first, last = np.minimum(begins, len(ids) - 1), ends - 1
        missing = np.zeros((len(ends), 2), np.bool_)
        if bos is not None:
            missing[some, 0] = ids[first[some]] != bos
        if eos is not None:
            missing[some, 1] = ids[last[some]] != eos
        flat = missing.ravel()
        places = np.stack([begins, ends], axis=1).ravel()[flat]
        values = np.tile(np.array([bos or 0, eos or 0], np.int32), len(ends))[flat]
        mask = self.mask
        if mask is not None:
            beside = np.stack([first, last], axis=1).ravel()[flat]
            mask = np.insert(mask, places, mask[beside])
        return Documents(Ragged(np.insert(ids, places, values), ends + np.cumsum(missing.sum(axis=1))), mask)


def documents_of(pieces: Sequence[Ids], masks: Sequence[Mask | None]) -> Documents:
    """Each piece is a document; without a mask, all of it is learned."""
    return Documents(Ragged.of(pieces, np.empty(0, np.int32)), joined_masks(masks, [len(piece) for piece in pieces]))


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The samples of consecutive records of a block, in block order."""

    heads: Heads
    samples: SampleGroup
    bad: Mapping[int, str] = field(default_factory=dict)  # record → why

    @property
    def learned(self) -> int:
        """Tokens that the loss looks at."""
        ids, mask = self.samples.ids, self.samples.mask
        return len(ids.values) if mask is None else int(mask.sum())
