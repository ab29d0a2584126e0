"""`stepfs-produce text` with a model's own tokenizer.json: begun, continued, and refused for another one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from test_produce_text import committed, produce, refused
from tokenizers import Tokenizer, normalizers

from stepfs_producer.transforms.model_text import load_model_text


def model_file(path: Path, *, normalizer: object) -> Path:
    """A byte-level BPE as Qwen's: NFC, and its end of a document above the vocabulary."""
    vocabulary = {chr(byte): byte - 0x21 for byte in range(0x21, 0x7F)} | {"Ġ": 94, "Ċ": 95}
    model = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": True,
                },
                "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
            }
        )
    )
    model.normalizer = normalizer
    model.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    model.save(str(path))
    return path


def test_a_models_file_is_produced_continued_and_kept(file_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world\n" * 20)
    (tmp_path / "b.txt").write_text("it ends with <|endoftext|> in the text")
    file = model_file(tmp_path / "tokenizer.json", normalizer=normalizers.NFC())
    common = [
        "-i",
        tmp_path / "a.txt",
        "-i",
        tmp_path / "b.txt",
        "--seq-len",
        16,
        "--batch-size",
        2,
        "--json",
    ]
    asked = ["--tokenizer", "huggingface", "--tokenizer-file", file]
    first = produce(file_url, *common, *asked, "--slices", 1, "--ext", ".npy", "--limit-steps", 2)
    assert first.returncode == 0, first.stderr
    second = produce(file_url, *common, *asked)
    assert second.returncode == 0, second.stderr
    total = json.loads(second.stdout)["total"]
    assert total["source_bytes"] == 240 + 38
    assert total["documents"] == 2

    tokenizer = load_model_text(file, eos=None, pad=None)
    assert json.loads(second.stdout)["tokenizer"] == tokenizer.identity
    (tmp_path / "rank.npy").write_bytes(b"")
    ids = []
    for _, (payload,) in committed(file_url):
        (tmp_path / "rank.npy").write_bytes(payload)
        stacked = np.load(tmp_path / "rank.npy")
        ids += stacked[0][stacked[3] >= 0].tolist()
    assert [place for place, number in enumerate(ids) if number == tokenizer.end] == [240, 240 + 1 + 38]
    assert max(ids) == tokenizer.end == 96

    other = model_file(tmp_path / "other.json", normalizer=None)
    refused(
        produce(file_url, *common, *asked[:3], other),
        4,
        "tokens of huggingface-",
        "continue with that tokenizer",
    )
    refused(produce(file_url, *common, *asked, "--eos", "<|im_end|>"), 4, "continue with that tokenizer")
    refused(produce(file_url, *common, *asked, "--eos", "<|im_emd|>"), 2, "did you mean '<|im_end|>'")
