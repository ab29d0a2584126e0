"""How records become documents: what a plan says of it, and the rule of BOS and EOS.

A document's tokens are opened by BOS and closed by EOS unless they are there already. A BOS or EOS that is added has the
mask of the token beside it: where the last turn of a chat is learned, so is its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

import numpy as np

from stepfs_producer.payloads.step import Columns, ColumnSpec
from stepfs_producer.plan.arrays import Ids, Integers, Mask

_POLICY: Final = {"identity": False}  # as of `sources.record`: the digest of the tokenizer stands beside it

Encoded = tuple[Ids, Mask, tuple[int, ...]]  # and the tokens of its parts: see `Tokenised`
BAD: Final = -1  # as a length: the record could not be decoded


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer, and the names of its special tokens; None: the usual ones, "" or `none`: no such token."""

    file: str | None = field(default=None, metadata=_POLICY)  # a model's tokenizer.json; None: tokens are bytes
    eos: str | None = None
    bos: str | None = None
    pad: str | None = field(default=None, metadata=_POLICY)
    control_tokens: str | None = None  # what a control token is that a text spells: text (None), or tokens
    digest: str | None = field(
        default=None, metadata=_POLICY
    )  # SHA-256 of the file, in hex: another content is refused. See `pinned`

    @property
    def kind(self) -> str:
        """The kind that a plan names."""
        return "bytes" if self.file is None else "huggingface"


@dataclass(frozen=True, slots=True)
class ImagesSpec:
    """Images in fields of records, which the user's function gets decoded: see `transforms.images`."""

    fields: tuple[str, ...]
    patch: int = 14  # pixels
    merge: int = 2  # patches
    patches_max: int = 4096
    background: tuple[int, ...] | None = None  # RGB, below what is transparent; None: white


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """Conversations in records, and how they are rendered and learned: see `transforms.chat`."""

    template: str  # of Jinja
    tokens: tuple[tuple[str, str], ...] = ()  # bos_token, eos_token, …, as templates know them
    messages: str = "messages"  # the field that holds the conversation
    tools: str | None = None  # the field that holds the tools
    system: str | None = None  # a field of text that comes first
    prompt: tuple[str, ...] = ()  # in place of `messages`: fields whose texts are the user's turn
    completion: str | None = None  # and the one that is the answer
    role: str = "role"
    content: str = "content"
    roles: tuple[tuple[str, str], ...] = ()  # the records' own name → a template's
    learn: str = "assistant"  # or last, all
    date: str | None = None  # that templates take for today's
    long: str | None = None  # truncate or split, at turns; None: a longer chat is no sample
    tokens_max: int | None = None  # of a part, if so


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Fields of a prompt and of two answers to it, which are text, or messages of a chat: see `transforms.pairs`."""

    prompt: str | None = None  # None: `prompt`, where a record has it; else what both answers begin with
    chosen: str = "chosen"
    rejected: str = "rejected"


@dataclass(frozen=True, slots=True)
class FimSpec:
    """Documents that are rearranged so that their middle comes last: see `transforms.fim`."""

    tokens: tuple[str, str, str]  # before the prefix, the middle and the suffix
    rate: Fraction  # of documents
    spm: Fraction  # of those: the suffix first
    level: str  # characters, or tokens


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """How a record becomes a sample."""

    tokenizer: TokenizerSpec
    call: str | None = None  # `module:function` of the user
    columns: tuple[ColumnSpec, ...] = ()  # that it may give
    images: ImagesSpec | None = None
    chat: ChatSpec | None = None  # in place of `call`
    pair: PairSpec | None = None  # in place of `call`; with `chat`, by its template
    fim: FimSpec | None = None


class UnfitRecordError(Exception):
    """The content of this record gives no sample; the message has the reason."""


def is_of_record(error: BaseException) -> bool:
    """Whether a library failed at its input: also by a panic of Rust code, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@dataclass(frozen=True, slots=True)
class Documents:
    """Token ids end to end, with one length per document."""

    ids: Ids
    lengths: Integers
    mask: Mask | None = None  # per id: 0 where the loss ignores it

    def closed(self, bos: int | None, eos: int | None) -> Documents:
        """The same documents, each between `bos` and `eos`. None: no such token is added."""
        some = self.lengths > 0
        ends = np.cumsum(self.lengths)
        begins = ends - self.lengths
        first, last = np.minimum(begins, len(self.ids) - 1), ends - 1
        missing = np.zeros((len(ends), 2), np.bool_)
        if bos is not None:
            missing[some, 0] = self.ids[first[some]] != bos
        if eos is not None:
            missing[some, 1] = self.ids[last[some]] != eos
        flat = missing.ravel()
        places = np.stack([begins, ends], axis=1).ravel()[flat]
        values = np.tile(np.array([bos or 0, eos or 0], np.int32), len(ends))[flat]
        mask = self.mask
        if mask is not None:
            beside = np.stack([first, last], axis=1).ravel()[flat]
            mask = np.insert(mask, places, mask[beside])
        return Documents(np.insert(self.ids, places, values), self.lengths + missing.sum(axis=1), mask)


def documents_of(pieces: Sequence[Ids], masks: Sequence[Mask | None]) -> Documents:
    """Each piece is a document; without a mask, all of it is learned."""
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    ids = np.concatenate([np.empty(0, np.int32), *pieces])
    if all(mask is None for mask in masks):
        return Documents(ids, lengths)
    whole = [np.ones(len(piece), np.uint8) if mask is None else mask for piece, mask in zip(pieces, masks, strict=True)]
    return Documents(ids, lengths, np.concatenate(whole))


@dataclass(frozen=True, slots=True)
class Tokenised:
    """The samples of consecutive records of a block, in block order."""

    lengths: Integers  # per record: tokens, EOS and BOS included; 0: no sample, BAD: undecodable
    ids: Ids  # of all records, end to end
    mask: Mask | None = None  # per id: 0 where the loss ignores it; None: nowhere
    bad: Mapping[int, str] = field(default_factory=dict)  # record → why
    columns: Columns | None = None  # of the records; None: of a source that gives none
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Record → tokens of its parts, of records that have several documents, or tokens behind them that are lost."""
