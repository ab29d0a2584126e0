"""How the records of a source become token ids: the tokenizer, and a function of the user's before or in place of it."""

from __future__ import annotations

from dataclasses import dataclass

from stepfs_producer.payloads.columns import ColumnSpec


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """A tokenizer, and the names of its special tokens; None: the usual ones, "" or `none`: no such token."""

    file: str | None = None  # a model's tokenizer.json; None: tokens are bytes
    eos: str | None = None
    bos: str | None = None
    pad: str | None = None
    digest: str | None = None  # SHA-256 of the file, in hex: another content is refused. See `pinned`

    @property
    def kind(self) -> str:
        """As plans name it."""
        return "bytes" if self.file is None else "huggingface"


@dataclass(frozen=True, slots=True)
class ImagesSpec:
    """Images in fields of records, which the user's function gets decoded: see `transforms.images`."""

    fields: tuple[str, ...]
    patch: int = 14  # pixels
    merge: int = 2  # patches
    patches_max: int = 4096


@dataclass(frozen=True, slots=True)
class TransformSpec:
    """How a record becomes a sample."""

    tokenizer: TokenizerSpec
    call: str | None = None  # `module:function` of the user
    columns: tuple[ColumnSpec, ...] = ()  # that it may give
    images: ImagesSpec | None = None
