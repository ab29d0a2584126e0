"""Tokenizers lose nothing, and training is a function of the texts."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers import models, normalizers, pre_tokenizers

from stepfs.errors import AbsentError, StepfsError, UsageError
from stepfs_producer.transforms import tokenize
from stepfs_producer.transforms.tokenize import (
    BpeTokenizer,
    ByteTokenizer,
    LosslessTokenizer,
    load_bpe,
    save_once,
    train_bpe,
)

TEXTS = [Path(os.__file__).read_bytes()[:60_000], "naïve 日本語 … <|end|>".encode() * 50]
MODEL = train_bpe(TEXTS, 600)
TOKENIZERS: list[LosslessTokenizer] = [ByteTokenizer(), BpeTokenizer(MODEL)]
texts = st.one_of(
    st.binary(max_size=200), st.text(max_size=80).map(lambda s: s.encode("utf-8", "surrogatepass"))
)


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
@given(data=texts)
@settings(max_examples=200)
def test_decode_undoes_encode_and_widths_add_up(tokenizer: LosslessTokenizer, data: bytes) -> None:
    ids = tokenizer.encode(data)
    assert tokenizer.decode(ids) == data
    assert int(tokenizer.widths(ids).sum()) == len(data)
    assert ids.dtype == np.int32
    if len(ids):
        assert ids.min() >= 0
        assert ids.max() < tokenizer.end < tokenizer.padding < tokenizer.vocabulary


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "bpe"])
def test_end_and_padding_stand_for_no_byte(tokenizer: LosslessTokenizer) -> None:
    marks = np.array([tokenizer.end, tokenizer.padding], np.int32)
    assert tokenizer.widths(marks).tolist() == [0, 0]
    assert tokenizer.decode(marks) == b""


def test_bpe_compresses_and_every_token_has_its_own_bytes() -> None:
    tokenizer = TOKENIZERS[1]
    ids = tokenizer.encode(TEXTS[0])
    assert len(ids) < 0.6 * len(TEXTS[0])
    offset = 0
    for number, width in zip(ids[:500], tokenizer.widths(ids)[:500], strict=True):
        assert tokenizer.decode(np.array([number])) == TEXTS[0][offset : offset + width]
        offset += int(width)


def test_training_is_the_same_in_another_process() -> None:
    program = (
        "import os, sys, pathlib, hashlib; from stepfs_producer.transforms.tokenize import train_bpe;"
        "sys.stdout.write(train_bpe([pathlib.Path(os.__file__).read_bytes()[:60_000],"
        "'naïve 日本語 … <|end|>'.encode() * 50], 600))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert other.stdout == MODEL


def test_a_model_is_saved_and_reused(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "bpe.json"
    save_once(path, MODEL)
    save_once(path, MODEL)
    assert load_bpe(path).identity == BpeTokenizer(MODEL).identity
    assert [p.name for p in path.parent.iterdir()] == ["bpe.json"]
    (tmp_path / "usual").touch()
    assert path.stat().st_mode == (tmp_path / "usual").stat().st_mode  # other users' producers read it, too


def test_what_is_not_a_lossless_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too small"):
        train_bpe([b"text"], 100)
    with pytest.raises(AbsentError, match="no such tokenizer"):
        load_bpe(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match=r"bad\.json: not a tokenizer file"):
        load_bpe(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_bytes(b"\xff{}")
    with pytest.raises(UsageError, match=r"bad\.json: not a tokenizer file.*UTF-8"):
        load_bpe(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="not a byte-level BPE"):
        BpeTokenizer(Model(models.BPE()).to_str())
    lossy = Model.from_str(MODEL)
    lossy.normalizer = normalizers.Lowercase()
    with pytest.raises(UsageError, match="normalizer"):
        BpeTokenizer(lossy.to_str())
    lossy = Model.from_str(MODEL)
    lossy.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(StepfsError, match="changes the text"):
        BpeTokenizer(lossy.to_str()).encode(b"ABC")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "find_spec", lambda _: None)
    for attempt in (lambda: train_bpe([b"text"], 300), lambda: BpeTokenizer(MODEL)):
        with pytest.raises(UsageError, match="pip install"):
            attempt()
