"""Fill in the middle: each document by itself, by its own bits; nothing of it is lost."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import model_files
import numpy as np
import pytest
from declared import tokenizer_spec, transform_spec
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformed import records_of

from stepfs.errors import UsageError
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.parts import Output
from stepfs_producer.plan.sources import Fim, Jsonl
from stepfs_producer.run.prepare import compile_plan
from stepfs_producer.sources.record import Kind
from stepfs_producer.transforms.documents import TransformSpec
from stepfs_producer.transforms.records import timed_transform, transform

NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
TEXTS = ["def f(x):\n    return x + 1\n", "print('é')", "", "x"] * 60


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens([AddedToken(name) for name in NAMES])
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    model.save(str(path))
    return str(path)


def spec_of(
    file: str, rate: str = "1", spm: str = "0.5", level: str = "characters", row: int | None = None
) -> TransformSpec:
    fim = Fim(tokens=NAMES, rate=Fraction(rate), spm=Fraction(spm), level=level)
    return replace(transform_spec(tokenizer_spec(file, eos="<|endoftext|>"), fim=fim), tokens_max=row)


def documents(spec: TransformSpec, texts: list[str], epoch: int = 0) -> list[list[int]]:
    found, _ = timed_transform(spec, 7, epoch, "code", records_of(Kind.TEXT, [one.encode() for one in texts]))
    assert not found.bad
    return [one.tolist() for one in found.samples.ids]


@pytest.mark.parametrize("level", ["characters", "tokens"])
@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.TOKENS])
def test_a_document_longer_than_a_row_stays_as_it_is(kind: Kind, level: str, file: str) -> None:
    """Cut into rows, it would be a suffix without its prefix, and a middle alone."""
    model = Tokenizer.from_file(file)
    names, row = {model.token_to_id(name) for name in NAMES}, 16
    texts = ["x = 1\n" * count for count in range(1, 20)]
    whole = [np.array(model.encode(one).ids, "<i4") for one in texts]
    data = [one.encode() for one in texts] if kind is Kind.TEXT else [one.tobytes() for one in whole]
    found, _ = timed_transform(spec_of(file, level=level, row=row), 7, 0, "code", records_of(kind, data))
    torn = 0
    for ids, plain in zip(found.samples.ids, whole, strict=True):
        there = names & set(ids.tolist())
        assert len(there) == (3 if there else 0)
        assert len(ids) <= row if there else len(plain) + 4 > row
        torn += not there
    assert 0 < torn == int(found.heads.plain.sum()) < len(texts)


def parts_of(model: Tokenizer, ids: list[int]) -> tuple[bool, list[str]]:
    """Whether the suffix comes first, and prefix, middle and suffix as text, by the published rule."""
    prefix, middle, suffix = (ids.index(model.token_to_id(name)) for name in NAMES)
    assert (prefix, ids[-1]) == (0, model.token_to_id("<|endoftext|>"))
    if suffix == 1:
        places = [(2, 2), (middle + 1, -1), (2, middle)]
    else:
        places = [(1, suffix), (middle + 1, -1), (suffix + 1, middle)]
    return suffix == 1, [model.decode(ids[slice(*one)]) for one in places]


def test_a_document_is_whole_and_closed_once(file: str) -> None:
    model = Tokenizer.from_file(file)
    made = documents(spec_of(file), TEXTS)
    orders = set()
    for ids, text in zip(made, TEXTS, strict=True):
        if not text:
            assert not ids, "nothing stays no sample"
            continue
        first, parts = parts_of(model, ids)
        orders.add(first)
        assert "".join(parts) == text
    assert orders == {True, False}
    assert len(set(map(tuple, made[::4]))) > 20, "the same text at another place has other cuts"


@pytest.mark.parametrize("level", ["characters", "tokens"])
def test_the_rates_are_those_asked_for_and_others_stay(level: str, file: str) -> None:
    plain = documents(transform_spec(tokenizer_spec(file, eos="<|endoftext|>")), TEXTS)
    made = documents(spec_of(file, "0.5", "0", level), TEXTS)
    changed = [one for one, other in zip(made, plain, strict=True) if one != other]
    assert 90 < len(changed) < 150
    assert documents(spec_of(file, "0"), TEXTS) == plain
    assert made == documents(spec_of(file, "0.5", "0", level), TEXTS)
    assert made != documents(spec_of(file, "0.5", "0", level), TEXTS, epoch=1)
    if level == "tokens":
        marks = {Tokenizer.from_file(file).token_to_id(name) for name in NAMES}
        for ids, other in zip(made, plain, strict=True):
            assert sorted(set(ids) - marks) == sorted(set(other))
            assert len(ids) in (len(other), len(other) + 3)


def test_the_row_that_cuts_is_that_of_the_shortest_stage() -> None:
    fim = {"tokens": NAMES}
    plan = Plan(
        output=Output(mesh="dp=1", micro_batch_tokens=256), stages=[{"sequence_length": 128}, {"from": 9, "sequence_length": 256}],
        tokenizer={"kind": "huggingface", "file": "x.json"}, sources={"code": Jsonl("x", fim=fim, sequence_length=64), "prose": Jsonl("y")},
    )  # fmt: skip
    found = compile_plan(plan, listings={}, tokenizer_digest="t").transforms
    assert (found["code"].tokens_max, found["prose"].tokens_max) == (64, 128)


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=20),
    st.booleans(),
    st.booleans(),
    st.binary(min_size=16, max_size=16),
)
def test_ids_are_cut_with_their_mask(file: str, ids: list[int], closed: bool, spm: bool, key: bytes) -> None:
    model = Tokenizer.from_file(file)
    eos, *marks = (model.token_to_id(name) or 0 for name in ("<|endoftext|>", *NAMES))
    ids = [one for one in ids if one != eos] + [eos] * closed
    mask = np.array([one % 2 for one in ids], np.uint8)
    data = np.array(ids, "<i4").tobytes()
    records = records_of(Kind.TOKENS, [data], mask=mask.tobytes())
    found = transform(spec_of(file, "1", str(int(spm))), records, [key])
    inside = [one for one in found.samples.ids.values.tolist() if one not in (*marks, eos)]
    if ids:
        assert sorted(inside) == sorted(one for one in ids if one != eos)
        made, mask = found.samples.ids.values, found.samples.mask
        assert made[-1] == eos
        learned = np.ones(len(made), np.uint8) if mask is None else mask
        for one, is_learned in zip(made[:-1].tolist(), learned[:-1].tolist(), strict=True):
            assert is_learned == (one in marks or one % 2)


@pytest.mark.parametrize(
    ("names", "of_model", "message"),
    [
        (("<fim_prefix>", "<fim_midle>", "<fim_suffix>"), True, "the fim middle token '<fim_midle>' is not in its vocabulary; did you mean '<fim_middle>'?"),
        (NAMES, False, "bytes have no fim prefix token '<fim_prefix>'; add tokenizer: {kind: huggingface"),
    ],
)  # fmt: skip
def test_a_token_that_is_not_there_is_named(names: Any, of_model: bool, message: str, file: str) -> None:
    spec = Fim(tokens=names, rate=Fraction(1), spm=Fraction(1), level="characters")
    tokenizer = tokenizer_spec(file, eos="<|endoftext|>") if of_model else tokenizer_spec()
    with pytest.raises(UsageError) as raised:
        transform(transform_spec(tokenizer, fim=spec), records_of(Kind.TEXT, [b"a"]), [bytes(16)])
    assert message in str(raised.value)
