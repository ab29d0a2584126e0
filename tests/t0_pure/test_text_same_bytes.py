"""Lakes hold what versions before made of a corpus: the same inputs give the same bytes, identity and position."""

import hashlib
import json
from pathlib import Path

import pytest

from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.records import Shard, TextSource
from stepfs_producer.text.steps import Shape, read_position, text_steps
from stepfs_producer.transforms.tokenize import BpeTokenizer, ByteTokenizer, Tokenizer


def gpt2_file() -> str:
    """A byte-level BPE in the form of GPT-2's file: its own <|endoftext|> is inside its vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = list(map(chr, [*plain, *range(0x100, 0x100 + 256 - len(plain))]))
    names += ["th", "the", "Ġthe", "<|endoftext|>"]
    token = {"id": 259, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False}
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {name: number for number, name in enumerate(names)}, "merges": ["t h", "th e", "Ġ the"],
    }  # fmt: skip
    data = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [token | {"normalized": False, "special": True}],
        "normalizer": None, "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": pre_tokenizer, "model": model,
    }  # fmt: skip
    return json.dumps(data)


@pytest.mark.parametrize(
    ("tokenizer", "identity", "digest"),
    [
        (ByteTokenizer(), "bytes", "6edb69f69481bfe86c65ffec4ad9af86c0f6a1d5db2c94cb7b03844e9f41519b"),
        (
            BpeTokenizer(gpt2_file()),
            "bpe-dfe30f0e7c09dc6f",
            "2f708526164e855b662be64aa1319b5d9bcfc5cd40a35dc915ddd1e8db357c7b",
        ),
    ],
    ids=["bytes", "bpe"],
)
def test_bytes_identity_and_positions_are_those_of_versions_before(
    tmp_path: Path, tokenizer: Tokenizer, identity: str, digest: str
) -> None:
    assert tokenizer.identity == identity
    (tmp_path / "a.txt").write_bytes(
        b"the other \xff\xfe then <|endoftext|> naive\n" * 20 + "日本語".encode()
    )
    (tmp_path / "b.jsonl").write_text('{"text": "the end"}\n{"text": ""}\n{"text": "\\ud800 the"}\n')
    source = TextSource(list_sources([tmp_path]))
    start = read_position(None, shard=Shard(), tokenizer=tokenizer.identity)
    found = hashlib.sha256()
    for ext in (".bin", ".npy", ".tar"):
        for step in text_steps(source, tokenizer, Shape(2, 2, 32, ext), start):
            for payload in step.payloads:
                found.update(payload)
            found.update(repr((sorted(step.position.value().items()), step.records, step.padding)).encode())
    assert found.hexdigest() == digest
