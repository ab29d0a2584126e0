"""Code and prose that are installed anyway, and a tokenizer trained on them, as a model would bring its own.

Code: sources of numpy, a document a file. Prose: the documentation in botocore's descriptions of services.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import botocore
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2048
EOS, PAD = "<|endoftext|>", "<|pad|>"


def write_corpus(directory: Path, *, services: str) -> None:
    """`code.jsonl` and `prose.jsonl`; `services` is a glob of botocore's."""
    files = sorted(Path(np.__file__).parent.glob("[a-m]*/*.py"))
    _write(directory / "code.jsonl", (path.read_text(encoding="utf-8") for path in files))
    described = sorted(Path(botocore.__file__).parent.glob(f"data/{services}/*/service-2.json.gz"))
    _write(directory / "prose.jsonl", _documentation_in(described))


def _write(path: Path, texts: Iterator[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts if text.strip())


def _documentation_in(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        for text in documentation(json.loads(gzip.decompress(path.read_bytes()))):
            yield re.sub("<[^>]*>", "", text)


def documentation(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "documentation" and isinstance(inner, str):
                yield inner
            else:
                yield from documentation(inner)


def texts_in(path: Path) -> dict[int, str]:
    """Offset of the record → its text, as in `spans`."""
    found, offset = {}, 0
    for line in path.read_bytes().splitlines(keepends=True):
        found[offset] = json.loads(line)["text"]
        offset += len(line)
    return found


def train_tokenizer(directory: Path) -> None:
    """`tokenizer.json`: a byte-level BPE with special tokens, as models have them."""
    texts = [text for name in ("code", "prose") for text in texts_in(directory / f"{name}.jsonl").values()]
    train_bpe(directory / "tokenizer.json", [text[:2000] for text in texts[::8]], VOCABULARY, [EOS, PAD])


def train_bpe(path: Path, texts: list[str], vocabulary: int, special_tokens: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
