"""Records → samples: a pure function of each record and its key, whatever stands beside it."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import model_files
import numpy as np
import pytest
from declared import tokenizer_spec, transform_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from transformed import keys_of, made, records_of

from stepfs.errors import StepfsError, UsageError
from stepfs_producer.plan.samples import BAD
from stepfs_producer.sources.record import Kind
from stepfs_producer.transforms.documents import Tokenised
from stepfs_producer.transforms.records import transform
from stepfs_producer.transforms.tokenizer import ModelTokenizer

BYTES = transform_spec(tokenizer_spec())


def ids(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def called(name: str, *values: object, kind: Kind = Kind.JSON, eos: str | None = "none") -> Tokenised:
    data = [str(value).encode() if kind is Kind.TEXT else json.dumps(value).encode() for value in values]
    return made(transform_spec(tokenizer_spec(eos=eos), f"user_functions:{name}"), records_of(kind, data))


def samples(result: Tokenised) -> list[list[int] | None]:
    """Per record: ids, or None if it is bad."""
    left = iter(result.samples.ids.values.tolist())
    out = [None if n == BAD else [next(left) for _ in range(n)] for n in result.heads.tokens.tolist()]
    assert next(left, None) is None
    assert set(result.bad) == {index for index, sample in enumerate(out) if sample is None}
    return out


def test_text_is_closed_and_what_is_no_sample_has_no_length() -> None:
    records = records_of(Kind.TEXT, [b"ab", b"", b"cd", b"\xffe", b"", b"f"], dropped=[2], bad={4: "no field 'text'"})
    result = made(BYTES, records)
    assert samples(result) == [[97, 98, 256], [], [], None, None, [102, 256]]
    assert result.bad == {3: "not UTF-8 at byte 0", 4: "no field 'text'"}
    assert (result.heads.tokens.dtype, result.samples.ids.values.dtype, result.samples.mask) == (
        np.int64,
        np.int32,
        None,
    )
    assert len(made(BYTES, records.part(0, 0)).heads.tokens) == 0
    dropped_and_bad = replace(records, dropped=np.ones(6, np.bool_))
    assert made(BYTES, dropped_and_bad).bad == {}, "a record of the other side is no bad record of this one"


def test_tokens_pass_and_are_closed_once() -> None:
    data = [ids(1, 2), ids(3, 256), ids(256), ids(), ids(5, 258), ids(6, -1)]
    result = made(BYTES, records_of(Kind.TOKENS, data, mask=bytes([0, 1, 1, 0, 1, 1, 1, 1, 1])))
    assert samples(result) == [[1, 2, 256], [3, 256], [256], [], None, None]
    assert result.samples.mask is not None
    assert result.samples.mask.tolist() == [0, 1, 1, 1, 0, 1], "an end that is added is learned as the token before it"
    assert result.bad[4] == "the id 258, but the ids of the tokenizer are 0 to 257"
    assert "the id -1" in result.bad[5]
    assert made(BYTES, records_of(Kind.TOKENS, data[:2], mask=b"\1\2\3\4")).samples.mask is None, "all ones is no mask"


def test_bos_and_eos_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(model_files.llama())
    spec = transform_spec(tokenizer_spec(str(path), eos="</s>", bos="<s>"))
    (text,) = samples(made(spec, records_of(Kind.TEXT, ["the</s>é".encode()])))
    assert (text[0], text[-1]) == (1, 2)
    assert not {1, 2} & set(text[1:-1])
    data = [ids(7, 8), ids(1, 7), ids(7, 2), ids(1, 7, 2), ids(1)]
    result = made(spec, records_of(Kind.TOKENS, data, mask=bytes([0, 1, 1, 1, 1, 1, 1, 1, 1, 1])))
    assert samples(result) == [[1, 7, 8, 2], [1, 7, 2], [1, 7, 2], [1, 7, 2], [1, 2]]
    assert result.samples.mask.tolist()[:4] == [0, 0, 1, 1]


def test_a_chat_with_a_mask() -> None:
    turns = [{"by": "user", "text": "hi"}, {"by": "assistant", "text": "yo"}]
    result = called("render", {"turns": turns}, {"turns": turns[:1]}, {"turns": []}, eos=None)
    assert samples(result) == [[104, 105, 121, 111, 256], [104, 105, 256], []]
    assert result.samples.mask.tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("record", "sample", "mask"), [
        ({"value": None}, [], None), ({"value": "ab"}, [97, 98], None), ({"value": ""}, [], None),
        ({"value": [5, 7]}, [5, 7], None), ({"value": []}, [], None),
        ({"value": [5, 7], "as": "tuple"}, [5, 7], None),
        ({"value": [5, 7], "as": "array"}, [5, 7], None),
        ({"value": [[5, 7], [0, 1]], "as": "tuple"}, [5, 7], [0, 1]),
        ({"value": [[5, 7], [True, False]], "as": "tuple"}, [5, 7], [1, 0]),
        ({"value": [[5, 7], None], "as": "tuple"}, [5, 7], None),
        ({"value": {"input_ids": [5, 7], "attention_mask": [1, 1]}}, [5, 7], None),
        ({"value": {"input_ids": [5, 7], "loss_mask": [0, 1]}}, [5, 7], [0, 1]),
        ({"value": {"input_ids": [5, 7], "labels": [-100, 7]}}, [5, 7], [0, 1]),
        ({"value": {"input_ids": [5, 7], "assistant_masks": [0, 1], "attention_mask": [1, 1]}}, [5, 7], [0, 1]),
        ({"value": {"input_ids": [5, 7], "completion_mask": [1, 0]}}, [5, 7], [1, 0]),
    ],
)  # fmt: skip
def test_what_a_function_may_return(record, sample, mask) -> None:
    result = called("anything", record)
    assert samples(result) == [sample]
    assert (None if result.samples.mask is None else result.samples.mask.tolist()) == mask


@pytest.mark.parametrize(
    ("record", "why"), [
        ({"raise": "ValueError"}, "raised ValueError: of no use"),
        ({"raise": "PanicException"}, "raised PanicException: of no use"), ({}, "raised KeyError: 'value'"),
        ({"value": 3}, "returned ids of type int"),
        ({"value": [5, 7], "as": "bytes"}, "returned ids of type bytes"),
        ({"value": [5, 7], "as": "floats"}, "returned ids of type float64"),
        ({"value": [True]}, "returned ids of type bool"),
        ({"value": [[5], [7, 8]]}, "returned ids that are no flat sequence"),
        ({"value": [[5], [7]]}, r"returned ids of type int64 and shape \(2, 1\)"),
        ({"value": ["a"]}, "returned ids of type <U1"),
        ({"value": [5, None]}, "returned ids of type object"),
        ({"value": [2**70]}, "returned ids of type object"),
        ({"value": [2**40]}, "returned the id 1099511627776"),
        ({"value": [258]}, "returned the id 258, but the ids of the tokenizer are 0 to 257"),
        ({"value": [[5, 7], [1]], "as": "tuple"}, "returned a mask of 1 for 2 ids"),
        ({"value": [[5, 7], [1, 2]], "as": "tuple"}, "returned a mask with other values than 0 and 1"),
        ({"value": {"columns": {}}}, r"returned a mapping without 'input_ids'; its keys are \['columns'\]"),
        ({"value": {"input_ids": [5], "loss_masks": [1]}}, "returned the unknown key 'loss_masks'; did you mean 'loss_mask'"),
        ({"value": {"input_ids": [5], "weight": 2}}, "returned the unknown key 'weight'; known: input_ids, text,"),
        ({"value": {"input_ids": [5, 0], "attention_mask": [1, 0]}}, "returned an 'attention_mask' with zeros; return ids without"),
        ({"value": {"input_ids": [5], "labels": [5], "loss_mask": [1]}}, "returned both"),
        ({"value": {"input_ids": [5, 7], "labels": [7, -100]}}, "returned the label 7 at place 0, where the id is 5"),
        ({"value": {"input_ids": [5, 7], "labels": [5]}}, "returned 1 labels for 2 ids"),
    ],
)  # fmt: skip
def test_what_a_function_may_not_do_makes_that_record_bad_alone(record, why: str) -> None:
    result = called("anything", {"value": [1]}, record, {"value": [2]})
    assert samples(result) == [[1], None, [2]]
    assert result.bad.keys() == {1}
    assert re.match(f"user_functions:anything {why}", result.bad[1]), result.bad[1]


def test_records_that_are_not_json_and_functions_of_text_and_tokens() -> None:
    spec = transform_spec(tokenizer_spec(eos="none"), "user_functions:anything")
    data = [b"{", b"[" * 200_000, b'{"value": "a"}', b"\xff"]
    result = made(spec, records_of(Kind.JSON, data))
    assert samples(result) == [None, None, [97], None]
    assert all(why.startswith("not JSON") and len(why) <= 300 for why in result.bad.values())
    assert samples(called("upper", "ab", kind=Kind.TEXT)) == [[65, 66]]
    assert samples(called("surprising_default", "x", kind=Kind.TEXT)) == [list(b'["x", 3]')]
    assert "half a character" in called("half_a_character", "x", kind=Kind.TEXT).bad[0]
    tokens = records_of(Kind.TOKENS, [ids(1, 2, 3)])
    halved = transform_spec(tokenizer_spec(eos="none"), "user_functions:halved")
    assert samples(made(halved, tokens)) == [[1, 3]]
    masked = made(halved, replace(tokens, mask=np.array([0, 1, 1], np.uint8)))
    assert (masked.samples.ids.values.tolist(), masked.samples.mask.tolist()) == ([1, 3], [0, 1])
    overwrite = transform_spec(tokenizer_spec(eos="none"), "user_functions:overwrite")
    assert samples(made(overwrite, tokens)) == [[7, 2, 3]]


def test_the_keys_reach_functions_that_want_them() -> None:
    spec = transform_spec(tokenizer_spec(eos="none"), "user_functions:shuffled")
    records = records_of(Kind.TEXT, [b"abcdefghijklmnop"] * 2)
    same = transform(spec, records, [b"k" * 16] * 2)
    first, second = samples(same)
    assert first == second != list(b"abcdefghijklmnop")
    first, second = samples(transform(spec, records, [b"k" * 16, b"l" * 16]))
    assert first != second


@pytest.mark.parametrize("error", ["OSError", "MemoryError"])
def test_an_error_of_the_machine_is_no_bad_record(error: str) -> None:
    with pytest.raises(StepfsError, match=rf"user_functions:anything failed: {error}: of no use; .*not the record"):
        called("anything", {"raise": error})


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("user_functions", "write module:function"),
        ("user_function:render", "no module 'user_function' in .* set PYTHONPATH"),
        ("user_functions:rendr", "has no 'rendr'; did you mean 'render'"),
        ("user_functions:constant", "is no function, but of type int"),
    ],
)
def test_a_function_that_is_not_there_stops_the_plan(call: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        made(transform_spec(tokenizer_spec(), call), records_of(Kind.JSON, [b"{}"]))
    with pytest.raises(UsageError, match="need a transform"):
        made(BYTES, records_of(Kind.JSON, [b"{}"]))


def test_a_text_that_the_model_has_no_token_for_is_bad_alone(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    path.write_text(model_files.words())
    spec = transform_spec(tokenizer_spec(str(path)))
    result = made(spec, records_of(Kind.TEXT, [b"the cat", b"the dog", b"cat </s>", b"cat"]))
    assert samples(result) == [[0, 1, 2], None, None, [1, 2]]
    assert "the tokenizer refuses the text" in result.bad[1]


@given(
    st.lists(
        st.one_of(
            st.text("ab é\n", max_size=6).map(lambda text: {"value": text}),
            st.lists(st.integers(0, 259), max_size=5).map(lambda value: {"value": value}),
            st.lists(st.integers(0, 1), max_size=4).map(lambda value: {"value": [value, value], "as": "tuple"}),
            st.sampled_from([{"value": None}, {"raise": "ValueError"}, {"value": 3}]),
        ),
        max_size=12,
    ),
    st.sets(st.integers(0, 12)),
    st.sets(st.integers(0, 11), max_size=4),
    st.sampled_from([None, "none"]),
)
@settings(max_examples=150)
def test_how_records_are_grouped_does_not_show(values, cuts, dropped, eos) -> None:
    spec = transform_spec(tokenizer_spec(eos=eos), "user_functions:anything")
    records = records_of(
        Kind.JSON, [json.dumps(value).encode() for value in values], dropped=dropped, bad={0: "x"} if values else {},
    )  # fmt: skip
    whole = made(spec, records)
    bounds = sorted({0, len(values), *(cut for cut in cuts if cut <= len(values))})
    keys = keys_of(records)
    parts = [(a, transform(spec, records.part(a, b), keys[a:b])) for a, b in itertools.pairwise(bounds)]
    joined = [sample for _, part in parts for sample in samples(part)]
    assert joined == samples(whole)
    ones = [
        np.ones(len(part.samples.ids.values), np.uint8) if part.samples.mask is None else part.samples.mask
        for _, part in parts
    ]
    mask = np.concatenate([np.empty(0, np.uint8), *ones])
    assert mask.tolist() == (np.ones_like(mask) if whole.samples.mask is None else whole.samples.mask).tolist()
    assert (whole.samples.mask is None) == bool(mask.all())
    assert {a + index: why for a, part in parts for index, why in part.bad.items()} == whole.bad


def test_a_text_that_a_model_s_tokenizer_would_need_gigabytes_for_is_bad_by_name(tmp_path, monkeypatch) -> None:
    """16 MiB took 2.3 GiB in a worker; bytes need no such bound."""
    monkeypatch.setattr(ModelTokenizer, "text_bytes_max", 12)
    path = tmp_path / "tokenizer.json"
    path.write_text(model_files.qwen())
    records = records_of(Kind.TEXT, [b"short", "grüße!!! ü".encode(), b"much too long", b"twelve bytes"])
    result = made(transform_spec(tokenizer_spec(str(path))), records)
    says = "this tokenizer takes at most 12"
    assert result.bad == {1: f"a text of 13 bytes; {says}", 2: f"a text of 13 bytes; {says}"}
    assert samples(made(BYTES, records))[2] is not None
