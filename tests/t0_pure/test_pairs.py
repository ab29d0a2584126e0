"""Preference pairs: two documents of one record, whole, in one row; the answers are learned."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import chat_templates
import model_files
import numpy as np
import planned
import pytest
import torch
from declared import chat_spec, tokenizer_spec, transform_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from tokenizers import Tokenizer
from transformed import made, records_of
from transformers import PreTrainedTokenizerFast

from stepfs.errors import UsageError
from stepfs.payload import PAIR, read_spans
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans, cut_to, gathered
from stepfs_producer.plan.cost import CostModel
from stepfs_producer.plan.file.digest import plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.planner import Planner
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.plan.rules import SourceRule
from stepfs_producer.plan.samples import Ahead, BlockHead, Heads, Piece
from stepfs_producer.plan.sources import Long, Pair
from stepfs_producer.plan.spans import Gathered, Span
from stepfs_producer.plan.step import End, StepPlan, read_position
from stepfs_producer.sources.record import Kind
from stepfs_producer.transforms.documents import TokenizerSpec

PAGE = (Path(__file__).resolve().parents[2] / "producer/PAYLOADS.md").read_text()
TEMPLATE = chat_templates.with_blocks("chatml")
ASK, GOOD, POOR = (
    {"role": "user", "content": "the cat"},
    {"role": "assistant", "content": "sat on the mat"},
    {"role": "assistant", "content": "ran"},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens(chat_templates.CONTROLS)
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    model.save(str(path))
    return str(path)


def sides(record: Any, tokenizer: TokenizerSpec, *, chat: bool, **names: Any) -> list[tuple[list[int], list[int]]]:
    """The ids and the mask of each side; an error of the record is raised."""
    spec = transform_spec(tokenizer, chat=chat_spec(TEMPLATE) if chat else None, pair=Pair(**names))
    found = made(spec, records_of(Kind.JSON, [json.dumps(record).encode()]))
    if found.bad:
        raise ValueError(found.bad[0])
    assert found.heads.documents is not None
    all_ids, (first, last) = found.samples.ids.values, found.heads.documents[0]
    assert last == found.heads.tokens[0] == len(all_ids)
    learned = np.ones(len(all_ids), np.uint8) if found.samples.mask is None else found.samples.mask
    ids, mask = np.split(all_ids, [first]), np.split(learned, [first])
    return [(one.tolist(), other.tolist()) for one, other in zip(ids, mask, strict=True)]


def sentencepiece(folder: Path) -> str:
    (folder / "tokenizer.json").write_text(model_files.llama())
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", ["byte-level", "SentencePiece"])
@pytest.mark.parametrize(("prompt", "answer"), [("the cat", " sat"), ("on:", "the"), ("th", "e mat"), ("the ", "the")])
def test_a_prompt_and_its_answer_are_one_text(prompt: str, answer: str, kind: str, model: str, tmp_path: Path) -> None:
    """As trl has it since 1.0: an answer tokenised alone begins with a `▁` that no generation has."""
    file = model if kind == "byte-level" else sentencepiece(tmp_path)
    theirs = Tokenizer.from_file(file)
    tokenizer = tokenizer_spec(file, eos="</s>", bos="<s>")
    for ids, mask in sides({"prompt": prompt, "chosen": answer, "rejected": answer}, tokenizer, chat=False):
        before = theirs.encode(prompt, add_special_tokens=False).ids
        whole = theirs.encode(prompt + answer, add_special_tokens=False).ids
        same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(before, whole, strict=False)))
        assert ids == [theirs.token_to_id("<s>"), *whole, theirs.token_to_id("</s>")]
        assert mask == [0] * (1 + same) + [1] * (len(whole) - same + 1)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [POOR]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, POOR]},
        {"prompt": "the cat", "chosen": "sat on the mat", "rejected": "ran"},
        {"prompt": [ASK], "chosen": GOOD["content"], "rejected": [POOR]},
        {"prompt": "the cat", "chosen": [ASK, GOOD], "rejected": [ASK, POOR]},  # UltraFeedback
        {"prompt": "another", "chosen": [ASK, GOOD], "rejected": [ASK, POOR]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, POOR]},
        {"prompt": "the cat", "chosen": [GOOD], "rejected": [POOR]},
    ],
)
def test_chats_are_those_of_transformers(record: Any, model: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_file=model, bos_token="<s>", eos_token="</s>")
    for (ids, mask), answer in zip(
        sides(record, tokenizer_spec(model, eos="</s>"), chat=True), (GOOD, POOR), strict=True
    ):
        expected: Any = theirs.apply_chat_template(
            [ASK, answer], chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
        )
        assert (ids, mask) == (expected["input_ids"], expected["assistant_masks"])


@given(st.text("ab ", max_size=8), st.text("ab ", max_size=8), st.text("ab ", max_size=8))
def test_answers_without_a_prompt_begin_alike(common: str, chosen: str, rejected: str) -> None:
    """As `extract_prompt` of trl: the longest common beginning, without a space at its end."""
    one, other = common + chosen, common + rejected
    same = next(
        (place for place, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1]),
        min(len(one), len(other)),
    )
    if one[same - 1 : same] == " ":
        same -= 1
    record = {"chosen": one, "rejected": other}
    if same in (len(one), len(other)):
        with pytest.raises(ValueError, match=r"nothing in '(chosen|rejected)' behind the prompt"):
            sides(record, tokenizer_spec(eos="none"), chat=False)
        return
    for (ids, mask), text in zip(sides(record, tokenizer_spec(eos="none"), chat=False), (one, other), strict=True):
        assert bytes(ids).decode() == text
        assert mask == [0] * same + [1] * (len(text) - same)


@pytest.mark.parametrize(
    ("record", "names", "chat", "message"),
    [
        ({"prompt": "a", "chosen": "", "rejected": "b"}, {}, False, "nothing in 'chosen' behind the prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, {}, False, "nothing in 'rejected' behind the prompt"),
        ({"prompt": "a", "chosen": "b"}, {}, False, "no answer or prompt in the field 'rejected'; it has 'prompt', 'chosen'"),
        ({"chosen": "b", "rejected": "c"}, {"prompt": "ask"}, False, "no answer or prompt in the field 'ask'"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [POOR]}, {}, False, "messages in the field 'prompt'; add chat: {}"),
        ({"chosen": [ASK, GOOD], "rejected": "b"}, {}, True, "one answer is text and the other messages"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [POOR]}, {}, True, "no learned token in 'chosen'"),
        ({"prompt": "\ud800", "chosen": "a", "rejected": "b"}, {}, False, "half a character"),
        ([], {}, False, "no object with the fields 'chosen' and 'rejected'"),
        ([], {"label": "good"}, False, "no object with the fields 'completion'"),
        ({"prompt": "a", "completion": "b"}, {"label": "good"}, False, "no label in the field 'good'; it has 'prompt', 'completion'"),
        ({"prompt": "a", "completion": "b", "good": None}, {"label": "good"}, False, "no label in the field 'good'"),
        ({"prompt": "a", "completion": "b", "good": "well"}, {"label": "good"}, False, "good: 'well', which is neither true nor false; write one of them"),
        ({"prompt": "a", "completion": "b", "good": 2}, {"label": "good"}, False, "good: 2, which is neither true nor false"),
        ({"prompt": "a", "completion": "b", "good": [True]}, {"label": "good"}, False, "good: [True], which is neither true nor false"),
        ({"completion": "b", "good": 1}, {"label": "good"}, False, "no answer or prompt in the field 'prompt'; it has 'completion', 'good'"),
        ({"prompt": "a", "completion": "", "good": 1}, {"label": "good"}, False, "nothing in 'completion' behind the prompt"),
        ({"prompt": "a", "text": "b", "good": 1}, {"label": "good"}, False, "no answer or prompt in the field 'completion'"),
        ({"prompt": [ASK], "completion": [ASK], "good": 1}, {"label": "good"}, True, "no learned token in 'completion'"),
        ({"prompt": [ASK], "completion": [GOOD], "good": 1}, {"label": "good"}, False, "messages in the field 'prompt'; add chat: {}"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "good": 1}, {"label": "good"}, False, "two answers beside 'good'; a source of labels has one"),
    ],
)  # fmt: skip
def test_what_is_no_pair_is_named(record: Any, names: Any, chat: bool, message: str, model: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sides(record, tokenizer_spec(model, eos="</s>"), chat=chat, **names)


def several(ends: list[list[int]]) -> Ragged:
    return Ragged.of([np.array(one, np.int64) for one in ends], np.empty(0, np.int64))


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=60)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(max_examples=60)
def test_no_pair_is_parted_or_cut(pairs: list[tuple[int, int]], ranks: int, micro: int, by_micro: bool) -> None:
    rules = planned.rules(
        {"pairs": 1}, lengths={0: 64}, ranks=ranks, micro_batches=micro, micro_batch_tokens=128,
        pad_last=True, sources={"pairs": SourceRule("pairs-1", long=Long.DROP, pairs=True)}, cost=CostModel(3, 2),
    )  # fmt: skip
    tokens = np.array([sum(one) for one in pairs], np.int64)
    begins = np.concatenate([[0], np.cumsum(tokens)])
    numbers = np.arange(len(pairs), dtype=np.int64)
    ids = np.arange(begins[-1], dtype=np.int32)
    both = several([[chosen, chosen + rejected] for chosen, rejected in pairs])
    group = SampleGroup(Ragged(ids, begins[1:]), None, 0 * numbers, numbers, (), both, numbers * 0 + 1)
    planner = Planner(rules)
    state = planner.begin()
    spec = PayloadSpec(".safetensors", False, 0, 1 << 20, by_micro, pairs=True)
    found: list[int] = []
    block = BlockHead(BlockAddress(0, 0, 0), len(pairs), BlockAddress(1, 0, 0))
    known = Piece(block, 0, Heads(tokens, documents=both))
    whole = Ahead([known], ended=True)
    while True:
        behind = state.sources["pairs"]
        plan = planner.next(state, {"pairs": whole if not behind.epoch else Ahead(ended=True)})
        if not isinstance(plan, StepPlan):
            break
        state = plan.after
        table = np.column_stack(
            [plan.spans[:, : Gathered.GROUP], 0 * plan.spans[:, 0], plan.spans[:, Span.RECORD : len(Span)]]
        )
        step = StepSpans(plan.shape, plan.sequence_length, plan.sources, table, np.zeros((len(table), 0), np.int64))
        task = gathered(step, [group], pairs=True)
        payloads, counts = construct(spec, task)
        assert counts == spec.records(plan.spans, plan.shape)
        for rank in range(ranks):
            mine = payloads[rank * micro : (rank + 1) * micro] if by_micro else payloads[rank : rank + 1]
            assert construct(spec, cut_to(task, [rank]))[0] == mine
        costs = np.zeros_like(plan.costs)
        for number, payload in enumerate(payloads):
            spans = read_spans(".safetensors", payload)
            for at, _, length, *_ in spans.table.tolist():  # as attention sees documents
                costs[divmod(number, micro) if by_micro else (number, at)] += 3 * length + 2 * length**2
            chosen, rejected = spans.table[::2], spans.table[1::2]
            assert chosen[:, PAIR].tolist() == [1] * len(chosen)
            assert rejected[:, PAIR].tolist() == [2] * len(rejected)
            for span, (one, other) in enumerate(zip(chosen.tolist(), rejected.tolist(), strict=True)):
                assert one[0] == other[0], "the same micro-batch"
                assert (one[6], one[7], other[7]) == (other[6], 0, one[2]), "the same record"
                assert (one[2], other[2]) == pairs[one[6]]
                assert [*spans.ids_of(2 * span), *spans.ids_of(2 * span + 1)] == list(
                    range(*begins[one[6] : one[6] + 2])
                )
                found.append(one[6])
        assert plan.costs.tolist() == costs.tolist(), "the balance is of the documents"
    assert sorted(found) == [number for number, one in enumerate(pairs) if sum(one) <= 64]
    assert isinstance(plan, End)
    assert state.sources["pairs"].dropped + plan.behind["pairs"][0] == len(pairs) - len(found), (
        "told, also of the last ones"
    )


@given(
    st.lists(st.lists(st.integers(1, 16), max_size=4), min_size=1, max_size=40),
    st.lists(st.integers(0, 9), min_size=40, max_size=40),
    st.integers(1, 9),
)
@settings(max_examples=60)
def test_parts_of_a_record_are_drawn_one_by_one_wherever_a_step_ends(
    parts: list[list[int]], tails: list[int], group: int
) -> None:
    """Records without a part are longer than a row, and dropped; what lies behind parts is lost."""
    tokens = [sum(own) + tail if own else 17 + tail for own, tail in zip(parts, tails, strict=False)]
    whole = Heads(np.array(tokens, np.int64), documents=several([[*accumulate(own)] for own in parts[: len(tokens)]]))
    block = BlockHead(BlockAddress(0, 0, 0), len(tokens), BlockAddress(1, 0, 0))
    rules = planned.rules(
        {"talks": 1}, lengths={0: 16}, ranks=2, micro_batch_tokens=16, pad_last=True,
        sources={"talks": SourceRule("talks-1", long=Long.DROP)}, cost=CostModel(3, 2),
    )  # fmt: skip
    planner, found, lost = Planner(rules), [], 0
    state = planner.begin()
    while True:
        first = state.sources["talks"].taken
        pieces = [
            Piece(block, at, whole.part(at, min(at + group, len(tokens)))) for at in range(first, len(tokens), group)
        ]
        plan = planner.next(state, {"talks": Ahead([] if state.sources["talks"].epoch else pieces, ended=True)})
        if not isinstance(plan, StepPlan):
            break
        state = planner.begin(read_position(plan.after.position()))
        lost += plan.lost["talks"]
        assert plan.costs.sum() == sum(3 * row[Span.TOKENS] + 2 * row[Span.TOKENS] ** 2 for row in plan.spans.tolist())
        for row in plan.spans.tolist():
            own = parts[row[Span.RECORD]]
            edges = [sum(own[:count]) for count in range(len(own) + 1)]
            part = edges.index(row[Span.FIRST])
            assert own[part] == row[Span.TOKENS], "each part is a document"
            found.append((row[Span.RECORD], part))
    assert sorted(found) == [(number, part) for number, own in enumerate(parts) for part in range(len(own))]
    last = max((number for number, own in enumerate(parts) if own), default=-1)
    assert lost == sum(tokens[: last + 1]) - sum(map(sum, parts))


def test_the_loss_of_the_page_is_that_of_each_pair_alone() -> None:
    """By the formula of arXiv:2305.18290, with models that look at the token alone."""
    pairs = [(5, 6), (3, 9), (20, 4)]
    lengths = np.array([sum(one) for one in pairs], np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    ids = (np.arange(begins[-1]) % 11).astype(np.int32)
    mask = (np.arange(begins[-1]) % 3 > 0).astype(np.uint8)
    both = several([[chosen, chosen + rejected] for chosen, rejected in pairs])
    group = SampleGroup(
        Ragged(ids, begins[1:]), mask, 0 * lengths, np.arange(3), documents=both, sides=np.ones(3, np.int64)
    )
    table = np.array(
        [[0, 0, 0, 0, 11, 0, 0, 0, 0, 0], [0, 0, 0, 11, 12, 0, 0, 0, 1, 0], [0, 0, 1, 0, 24, 0, 0, 0, 2, 0]]
    )
    step = StepSpans((1, 1, 2), 32, ("pairs",), table, np.zeros((3, 0), np.int64))
    spec = PayloadSpec(".safetensors", True, 0, 11, pairs=True)
    batch = load(construct(spec, gathered(step, [group], pairs=True))[0][0])
    scope: dict[str, Any] = {"torch": torch}
    exec(re.findall(r"```python\n(def dpo_loss.*?)```", PAGE, re.DOTALL)[0], scope)
    weights = [torch.from_numpy(np.random.default_rng(seed).normal(size=(11, 11))) for seed in (1, 2)]
    models = [lambda given, one=one: one[given] for one in weights]
    found = scope["dpo_loss"](*models, batch, 0)

    def score(weight: torch.Tensor, first: int, last: int) -> float:
        chances = torch.log_softmax(weight, dim=1)
        return sum(float(chances[ids[at - 1], ids[at]]) for at in range(first + 1, last) if mask[at])

    losses = []
    for begin, (chosen, rejected) in zip(begins.tolist(), pairs, strict=False):
        places = (begin, begin + chosen), (begin + chosen, begin + chosen + rejected)
        one, other = (score(weights[0], *place) - score(weights[1], *place) for place in places)
        losses.append(math.log1p(math.exp(-0.1 * (one - other))))
    assert float(found) == pytest.approx(sum(losses) / 3, rel=1e-5)


PLAN: dict[str, Any] = {"output": {"mesh": "dp=1", "sequence_length": 64}}


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ({"pair": {}, "long": "split"}, {}, "pairs longer than a row are dropped and counted; use drop"),
        ({"pair": {}, "text_field": "a"}, {}, "give one of pair and text_field"),
        ({"pair": {}, "chat": {"learn": "all"}}, {}, "the answers of a pair are learned; remove learn"),
        ({"pair": {"label": "good", "rejected": "rejected"}}, {}, "give one of label and rejected"),
        ({"pair": {"label": "good", "chosen": "a"}}, {}, "give one of label and chosen"),
        ({"pair": {"completion": "a"}}, {}, "completion is an answer with a label; add label: label"),
        (
            {"pair": {"label": "good"}, "long": "truncate"},
            {},
            "pairs longer than a row are dropped and counted; use drop",
        ),
        ({"pair": {"label": "good"}, "fim": {"tokens": ["a", "b", "c"]}}, {}, "give one of pair and fim"),
        (
            {"pair": {"label": "good"}},
            {"output": {"mesh": "dp=1", "sequence_length": 64, "ext": ".npy"}},
            ".npy files have no spans, which say of which answer a document is",
        ),
        (
            {"pair": {"label": "good"}},
            {"output": {"mesh": "dp=1", "sequence_length": 64, "ext": ".bin"}},
            ".bin files hold token ids alone",
        ),
        ({"pair": {}}, {"pack": "concat"}, "concat cuts documents, and those of source 'a' are whole; use best_fit"),
        ({"fim": {"tokens": ["a", "b"]}}, {}, "are no three tokens; write [<fim_prefix>, <fim_middle>, <fim_suffix>]"),
        ({"fim": {"tokens": ["a", "b", "c"]}, "chat": {}}, {}, "give one of chat and fim"),
    ],
)
def test_mistakes_of_a_plan(source: Any, more: Any, message: str) -> None:
    known = {"tokenizer": {"kind": "huggingface", "file": "tokenizer.json"}}
    with pytest.raises(UsageError, match=re.escape(message)):
        parsed_plan(PLAN | known | more | {"sources": {"a": {"format": "jsonl", "files": "a.jsonl", **source}}})


@pytest.mark.parametrize("pair", [{}, {"label": "good"}, {"label": "good", "completion": "said", "prompt": "asked"}])
def test_a_kept_plan_with_pairs_is_read_again(pair: Any) -> None:
    plan = parsed_plan(PLAN | {"sources": {"a": {"format": "jsonl", "files": "a.jsonl", "pair": pair}}})
    assert plan_digest(plan_of_text(plan_text(plan))) == plan_digest(plan)
    assert json.loads(plan_text(plan))["sources"]["a"]["long"] == "drop"
