"""A model's own file in `stepfs-produce text`: its ids, its end of a document, spans that never lie."""

import json
import unicodedata
from collections import defaultdict
from pathlib import Path

import model_files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepfs.errors import AbsentError, UsageError
from stepfs_producer.cli.vocabulary import Vocabulary
from stepfs_producer.text.pack import pack
from stepfs_producer.text.records import Place, Record
from stepfs_producer.transforms.model_text import ModelText
from stepfs_producer.transforms.model_tokenizer import ModelTokenizer
from stepfs_producer.transforms.spec import TokenizerKind, TokenizerSpec
from stepfs_producer.transforms.tokenize import BpeTokenizer, ByteTokenizer

HF = TokenizerKind.HUGGINGFACE
NAMES = {"qwen": None, "llama": None, "bert": "[SEP]", "gpt2": None}
MODELS = {
    name: ModelTokenizer(TokenizerSpec(HF, f"{name}.json", eos=eos), getattr(model_files, name)())
    for name, eos in NAMES.items()
}
TEXTS = {name: ModelText(model) for name, model in MODELS.items()}


def one(data: bytes, name: str = "doc") -> Record:
    return Record(name, 7, data, Place(name, 0, 0), Place(name, len(data), 0))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=40) | st.text("the cat é\u0301<tool_call>日\n", max_size=30).map(str.encode))
@settings(max_examples=100)
def test_ids_are_the_models_and_edges_are_exact_or_unknown(name: str, data: bytes) -> None:
    text = TEXTS[name]
    ids = text.encode(data)
    assert text.end not in ids
    edges = text.edges(data, ids)
    if data == data.decode("utf-8", "ignore").encode():
        assert ids.tolist() == MODELS[name].encode_plain([data.decode()]).ids.tolist()
    if edges is not None:
        assert (edges[0], edges[-1], len(edges)) == (0, len(data), len(ids) + 1)
        assert (np.diff(edges) >= 0).all()
    else:
        assert name != "gpt2", "a byte-level model without a normaliser is always exact"


def test_what_a_normaliser_left_alone_is_exact() -> None:
    qwen = TEXTS["qwen"]
    for data in (b"the cat\n", "naïve 日本語<tool_call>".encode(), b"\xff\xfe the \x80"):
        assert qwen.edges(data, qwen.encode(data)) is not None
    apart = unicodedata.normalize("NFD", "naïve").encode()
    assert qwen.edges(apart, qwen.encode(apart)) is None
    llama = TEXTS["llama"]
    assert llama.edges(b"the", llama.encode(b"the")) is None


@given(
    st.lists(st.sampled_from([b"the cat", b"", "nai\u0308ve the cat".encode(), b"over \xff"]), max_size=6),
    st.integers(1, 3),
    st.integers(2, 9),
)
@settings(max_examples=100)
def test_packed_bytes_are_counted_once_and_inexact_spans_say_the_record(
    data, rows: int, seq_len: int
) -> None:
    qwen = TEXTS["qwen"]
    records = [
        Record(f"d{n}", 7, one_of, Place(f"{n}", 0, 0), Place(f"{n + 1}", 0, 0))
        for n, one_of in enumerate(data)
    ]
    steps = list(pack(records, qwen, rows=rows, seq_len=seq_len))
    assert sum(step.source_bytes for step in steps) == sum(map(len, data))
    spans = defaultdict(list)
    for step in steps:
        for span in step.spans:
            spans[span.document].append((span.offset, span.size))
    for record in records:
        found = spans[record.document]
        if qwen.edges(record.data, qwen.encode(record.data)) is None:
            assert set(found) == {(7, len(record.data))}
        else:
            assert found[0][0] == 7
            assert sum(size for _, size in found) == len(record.data)
    ids = np.concatenate([step.input_ids.ravel() for step in steps]) if steps else np.empty(0)
    assert (ids == qwen.end).sum() >= len(data)


def test_which_tokenizer_a_command_line_gets(tmp_path: Path) -> None:
    def asked(kind: str, file: str | None = None, eos: str | None = None, pad: str | None = None):
        path = None if file is None else tmp_path / file
        return Vocabulary(TokenizerKind(kind), 300, path, eos, pad).tokenizer((), text_field="text")

    for name in NAMES:
        (tmp_path / f"{name}.json").write_text(getattr(model_files, name)())
    (tmp_path / "damaged.json").write_text("{")
    assert isinstance(asked("bytes"), ByteTokenizer)
    assert isinstance(asked("bpe", "gpt2.json"), BpeTokenizer), "as before: its positions must stay"
    assert asked("huggingface", "gpt2.json").end == 0
    assert asked("bpe", "gpt2.json", eos="<|endoftext|>").end == 0
    for kind in ("bpe", "huggingface"):
        assert asked(kind, "qwen.json").identity == TEXTS["qwen"].identity
        assert asked(kind, "llama.json").end == 2
        assert asked(kind, "qwen.json", eos="<|im_end|>").identity != TEXTS["qwen"].identity
    assert asked("huggingface", "bert.json", eos="[SEP]").padding == 0
    assert asked("huggingface", "qwen.json", pad="a").padding != TEXTS["qwen"].padding
    with pytest.raises(UsageError, match=r"bert\.json does not say which token ends"):
        asked("bpe", "bert.json")
    with pytest.raises(UsageError, match=r"damaged\.json"):
        asked("bpe", "damaged.json")
    with pytest.raises(UsageError, match=r"needs the model's file: --tokenizer-file"):
        asked("huggingface")
    with pytest.raises(AbsentError, match="no such tokenizer"):
        asked("huggingface", "none.json")
    with pytest.raises(UsageError, match="name the token with --eos"):
        asked("huggingface", "qwen.json", eos="none")
    for kind in ("bytes", "bpe"):
        with pytest.raises(UsageError, match="--eos and --pad name tokens of a model"):
            asked(kind, pad="<pad>")
    assert json.loads((tmp_path / "gpt2.json").read_text())["model"]["vocab"]["<|endoftext|>"] == 0
