"""Sources, tokenizers and transforms as a plan would declare them, by few words; of values that no plan may have, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from stepfs_producer.payloads.step import ColumnSpec
from stepfs_producer.plan.sources import (
    Chat,
    Column,
    Jsonl,
    Megatron,
    OnError,
    Parquet,
    Shuffle,
    Source,
    SourceFiles,
    Table,
    Text,
    Tokenizer,
)
from stepfs_producer.plan.values import Shard
from stepfs_producer.sources.record import SourceSpec
from stepfs_producer.transforms.documents import ChatSpec, TokenizerSpec, TransformSpec
from stepfs_producer.transforms.model_folder import Templates

KINDS = {"jsonl": Jsonl, "text": Text, "parquet": Parquet, "megatron": Megatron}


def source_spec(
    *files: Path | str,
    form: str = "jsonl",
    name: str = "code",
    seed: int = 0,
    held_out: bool = False,
    shuffle: bool = True,
    block_bytes: int | None = None,
    shard: tuple[int, int] = (0, 1),
    **settings: Any,
) -> SourceSpec:
    source: SourceFiles = (Source if ":" in form else KINDS.get(form, Table))(*map(str, files), format=form)
    source = source.changed(shuffle=Shuffle() if shuffle else None, shard=Shard(*shard))
    return changed(SourceSpec(name, source, seed, held_out, block_bytes), **settings)


def changed(
    spec: SourceSpec, *, whole_records: bool = False, skip_damaged: bool = False, **settings: Any
) -> SourceSpec:
    """The same with these settings of its source."""
    assert settings.keys() <= spec.source.__dataclass_fields__.keys()
    if whole_records:
        settings["transform"] = "module:function"
    if skip_damaged:
        settings["on_error"] = OnError(do="skip", file="skip")
    return replace(spec, source=spec.source.changed(**settings))


def tokenizer_spec(file: Path | str | None = None, **names: Any) -> TokenizerSpec:
    """The bytes of texts, or the model whose file that is."""
    of_model: Any = {} if file is None else {"kind": "huggingface", "file": str(file)}
    return TokenizerSpec(Tokenizer(**of_model, **names))


def transform_spec(
    tokenizer: TokenizerSpec | None = None,
    call: str | None = None,
    columns: tuple[ColumnSpec, ...] = (),
    *,
    chat: ChatSpec | None = None,
    tokens_max: int | None = None,
    **settings: Any,
) -> TransformSpec:
    """`settings`: of the source, such as `fim`."""
    source = Parquet("x").changed(transform=call, chat=None if chat is None else chat.chat, **settings)
    return TransformSpec(source, tokenizer or TokenizerSpec(), columns, chat, tokens_max)


def column_spec(name: str, dtype: str, shape: tuple[int, ...], *, own_file: bool = False) -> ColumnSpec:
    return ColumnSpec(name, Column(dtype=dtype, shape=shape, file="own" if own_file else "rank"))


def chat_spec(
    template: str,
    *,
    tokens: tuple[tuple[str, str | None], ...] = (),
    of_tools: str | None = None,
    long: str | None = None,
    tokens_max: int | None = None,
    **settings: Any,
) -> ChatSpec:
    return ChatSpec(Chat(**settings), Templates(template, of_tools), tokens, tokens_max, long == "truncate")
