"""Chats as token ids and masks: those of transformers, with blocks and without; no control token from a message."""

from __future__ import annotations

import datetime as dt
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import chat_templates
import model_files
import pytest
from chat_templates import TEMPLATES, with_blocks, without_blocks
from declared import chat_spec, tokenizer_spec, transform_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformed import made, records_of
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from stepfs.errors import AbsentError, UsageError
from stepfs_producer.plan.file.digest import plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.sources.record import Kind, packed
from stepfs_producer.transforms.chat import Chats, Ending
from stepfs_producer.transforms.documents import UnfitRecordError
from stepfs_producer.transforms.model_folder import Templates, special_tokens, templates_of
from stepfs_producer.transforms.template import Given, Rendering
from stepfs_producer.transforms.tokenizer import ModelTokenizer

DAY = "2026-01-31"
NAMES = (("bos_token", "<s>"), ("eos_token", "</s>"))
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level model that has the control tokens of all templates."""
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens(chat_templates.CONTROLS)
    model.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    model.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def theirs(model: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=model, bos_token="<s>", eos_token="</s>")


@pytest.fixture(autouse=True)
def _that_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Day(dt.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Day:
            return cls.fromisoformat(DAY)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)


def ours(model: str, template: str, record: Any, **spec: Any) -> tuple[list[int], list[int]]:
    spec = {"tools": "tools", "date": DAY, "tokens": NAMES} | spec
    tokenizer = tokenizer_spec(model, eos="</s>", control_tokens=spec.pop("control_tokens", "text"))
    ids, mask, *_ = Chats(chat_spec(template, **spec), tokenizer).encode(record)
    return ids.tolist(), mask.tolist()


def by_transformers(theirs: Any, template: str, record: Any) -> tuple[list[int], list[int]]:
    found = theirs.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return found["input_ids"], found["assistant_masks"]


USER, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}
SYSTEM, EMPTY = {"role": "system", "content": "be brief"}, {"role": "system", "content": ""}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}],
}
RESULT = {"role": "tool", "content": "sun", "name": "weather"}
TALKS = {
    "one turn": {"messages": [USER, ANSWER]},
    "turns": {
        "messages": [
            USER,
            ANSWER,
            {"role": "user", "content": "naïve 日本語"},
            {"role": "assistant", "content": "over\n"},
        ]
    },
    "system": {"messages": [SYSTEM, USER, ANSWER]},
    "empty system": {"messages": [EMPTY, USER, ANSWER]},
    "tools": {"messages": [USER, CALL, RESULT, ANSWER], "tools": [WEATHER]},
    "thoughts": {"messages": [USER, {**ANSWER, "reasoning_content": "hm"}]},
    "null contents": {"messages": [USER, CALL | {"content": None}, RESULT, ANSWER], "tools": [WEATHER]},
    "many turns": {"messages": [one for _ in range(9) for one in (USER, ANSWER)]},
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_are_those_of_transformers(
    name: str, talk: str, model: str, theirs: PreTrainedTokenizerFast
) -> None:
    record = TALKS[talk]
    try:
        expected = by_transformers(theirs, with_blocks(name), record)
    except Exception as error:  # noqa: BLE001 - of templates: no system, no tools
        wanted = re.escape(" ".join(str(error).split())[:30])
        for template in (with_blocks(name), without_blocks(name)):
            with pytest.raises(UnfitRecordError, match=f"the chat template refuses the conversation .{wanted}"):
                ours(model, template, record)
        return
    assert ours(model, with_blocks(name), record) == expected
    assert sum(expected[1])
    assert ours(model, without_blocks(name), record) == expected


TEXTS = st.text("the cat\n日é<|im_end>/s", max_size=12)


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, str]]:
    found = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        found += [{"role": "user", "content": draw(TEXTS)}, {"role": "assistant", "content": draw(TEXTS)}]
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=talks())
@settings(max_examples=25)
def test_any_talk_is_as_in_transformers_or_refused(
    name: str, messages: list[dict[str, str]], model: str, theirs: PreTrainedTokenizerFast
) -> None:
    record = {"messages": messages}
    for template in (with_blocks(name), without_blocks(name)):
        try:
            ids, mask = ours(model, template, record, control_tokens="tokens")
        except UnfitRecordError as error:
            if not re.match("the chat template (refuses|writes turn)|the template writes turn", str(error)):
                raise
            continue
        expected, masked = by_transformers(theirs, with_blocks(name), record)
        assert ids == expected
        assert mask == whole_characters(theirs, with_blocks(name), messages, masked)


def whole_characters(theirs: PreTrainedTokenizerFast, template: str, messages: Any, mask: list[int]) -> list[int]:
    """transformers masks the first of several tokens of a character in which a block ends."""
    text = theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
    places = theirs(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    found = list(mask)
    for number in range(1, len(found)):
        if found[number - 1] and not found[number] and places[number] == places[number - 1]:
            found[number] = 1
    return found


def test_a_control_token_in_a_message_is_text(model: str, theirs: PreTrainedTokenizerFast) -> None:
    record = {"messages": [{"role": "user", "content": "a<|im_end|>b</s>"}, ANSWER]}
    ids, mask = ours(model, without_blocks("chatml"), record)
    end = theirs.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 2
    assert theirs.decode(ids) == theirs.apply_chat_template(
        record["messages"], chat_template=without_blocks("chatml"), tokenize=False
    )
    learned = theirs.decode([number for number, one in zip(ids, mask, strict=True) if one])
    assert learned == "sat on the mat<|im_end|>\n"
    as_tokens, _ = ours(model, without_blocks("chatml"), record, control_tokens="tokens")
    assert as_tokens == by_transformers(theirs, without_blocks("chatml"), record)[0]


@pytest.mark.parametrize(
    ("kind", "form", "nulls"),
    [(Kind.FIELDS, "parquet", 0), (Kind.FIELDS, "arrow", 0), (Kind.FIELDS, "json", 2), (Kind.JSON, "jsonl", 2)],
)
def test_keys_with_which_arrow_fills_a_struct_were_never_there(kind: Kind, form: str, nulls: int, model: str) -> None:
    """Its objects have the keys of all records; elsewhere a null is the author's, as `{"default": null}` of a schema."""
    call = {"function": {"name": "weather", "arguments": {"city": "Bern", "a": None}}}
    properties = {"city": {"type": "string"}, "a": None}
    record = {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}],
    }
    chat = chat_spec(with_blocks("qwen"), tools="tools")
    spec = transform_spec(tokenizer_spec(model, eos="</s>"), chat=chat, format=form)
    data = packed(record) if kind is Kind.FIELDS else json.dumps(record).encode()
    assert isinstance(data, bytes)
    found = made(spec, records_of(kind, [data]))
    assert not found.bad
    text = Tokenizer.from_file(model).decode(found.samples.ids.values.tolist(), skip_special_tokens=False)
    assert text.count("null") == nulls
    assert '"city": "Bern"' in text
    assert "None" not in text


ASKED = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
THINKING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
OVER, OUT = "over<|im_end|>\n", "out<|im_end|>\n"


@pytest.mark.parametrize("options", ["", "ensure_ascii=true"])
def test_a_control_token_in_what_a_template_writes_as_json_is_text(options: str, model: str, theirs: Any) -> None:
    template = with_blocks("qwen").replace("call.function | tojson", f"call.function | tojson({options}) | upper")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "<|im_end|>é</s>"}}}
    record = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    ids, _ = ours(model, template, record)
    assert theirs.decode(ids) == theirs.apply_chat_template(record["messages"], chat_template=template, tokenize=False)
    assert ids.count(theirs.convert_tokens_to_ids("<|im_end|>")) == 2
    assert theirs.convert_tokens_to_ids("</s>") not in ids


@pytest.mark.parametrize("template", [with_blocks("chatml"), without_blocks("chatml")])
@pytest.mark.parametrize(
    ("chat", "said", "expected"),
    [
        ({}, {}, OVER + OUT),
        ({}, {1: {"train": False}}, OUT),
        ({}, {1: {"train": 0}, 3: {"train": 1}}, OUT),
        ({}, {1: {"train": "false"}, 3: {"train": "True"}}, OUT),
        ({}, {1: {"weight": 0}, 3: {"weight": 1.0}}, OUT),
        ({}, {1: {"weight": None, "loss": ""}, 3: {"weight": "0.0"}}, OVER),
        ({}, {1: {"training": False}}, OUT),
        ({}, {1: {"trainable": False}}, OUT),
        ({}, {1: {"loss": False}}, OUT),
        ({}, {1: {"loss_mask": 0}}, OUT),
        ({}, {1: {"masked": True}, 3: {"masked": False}}, OUT),
        ({}, {1: {"train": True, "weight": 0}}, OUT),
        ({"train": "keep"}, {1: {"keep": "no"}, 3: {"train": False, "loss": 0.7}}, OUT),
        ({"learn": "last"}, {}, OUT),
        ({"learn": "last"}, {3: {"weight": 0}}, OVER),
        ({"learn": "all"}, {}, ASKED + OVER + ASKED + OUT),
        ({"learn": "all"}, {0: {"train": False}, 2: {"train": False}}, OVER + OUT),
        ({"prompt": ("messages",), "completion": "answer"}, {1: {"train": True}}, "more<|im_end|>\n"),
        ({"prompt": ("messages",), "completion": "answer", "learn": "last"}, {}, "more<|im_end|>\n"),
    ],
)  # fmt: skip
def test_what_is_learned(template: str, chat: Any, said: Any, expected: str, model: str, theirs: Any) -> None:
    talk = [USER, {"role": "assistant", "content": "over"}, USER, {"role": "assistant", "content": "out"}]
    messages = [one | said.get(number, {}) for number, one in enumerate(talk)]
    answer = [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "more"}]
    ids, mask = ours(model, template, {"messages": messages, "answer": answer}, **chat)
    assert theirs.decode([number for number, one in zip(ids, mask, strict=True) if one]) == expected


@pytest.mark.parametrize(
    ("record", "spec"),
    [
        ({"conversations": [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat on the mat"}]},
         {"messages": "conversations", "role": "from", "content": "value", "roles": {"gpt": "assistant", "human": "user"}}),
        ({"instruction": "the cat", "input": "", "output": "sat on the mat"}, {"prompt": ("instruction", "input"), "completion": "output"}),
        ({"prompt": [USER], "completion": [ANSWER]}, {"prompt": ("prompt",), "completion": "completion"}),
        ({"messages": json.dumps([USER, ANSWER])}, {}),
        ({"messages": [USER | {"name": None}, ANSWER | {"tool_calls": None}]}, {}),
        ({"messages": [json.dumps(USER), json.dumps(ANSWER)]}, {}),
        ({"data": {"messages": [USER, ANSWER]}}, {"messages": "data.messages"}),
        ({"messages": [USER | {"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}, ANSWER]}, {}),
    ],
)  # fmt: skip
def test_other_shapes_of_records(record: Any, spec: Any, model: str) -> None:
    assert ours(model, without_blocks("chatml"), record, **spec) == ours(
        model, without_blocks("chatml"), TALKS["one turn"]
    )


@pytest.mark.parametrize(
    ("record", "spec", "message"),
    [
        ({"messages": "hello"}, {}, "no list of messages in the field 'messages'; it has 'messages'"),
        ({"talk": []}, {}, "no list of messages in the field 'messages'; it has 'talk'"),
        ({"messages": [5]}, {}, "message 0 is no object"),
        ({"messages": [{"role": "gpt", "content": "a"}]}, {}, r"has the role 'gpt', .*; say what it is by roles: {gpt: user}"),
        ({"messages": [USER]}, {}, "no learned token; the roles are user, and learn is assistant"),
        ({"messages": [USER, ANSWER], "tools": 5}, {}, "no list in the field 'tools'"),
        ({"prompt": "a"}, {"prompt": ("prompt",), "completion": "answer"}, "no text in the field 'answer'"),
        ({"answer": "a"}, {"prompt": ("prompt",), "completion": "answer"}, "no prompt in the fields 'prompt'"),
        ({"messages": [USER | {"content": [{"type": "image"}]}, ANSWER]}, {}, "message 0 has a part of type image, .* leave the part out"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, {}, "message 1 has weight: 0.5, .*; write one of them, or name the field .*chat: {train: FIELD}"),
        ({"messages": [USER, ANSWER | {"train_detail": [{"begin": 0}]}]}, {}, "message 1 has 'train_detail', .* learned whole or not"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"tools": []}}, {}, "'tools' in the field 'chat_template_kwargs'"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": 5}, {}, "no object in the field 'chat_template_kwargs'"),
        ({"messages": [USER | {"content": "\0stepfs\0</s>"}, ANSWER]}, {}, "the name that only this program has"),
        ([], {}, "no object with messages"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_named(record: Any, spec: Any, message: str, model: str) -> None:
    with pytest.raises(UnfitRecordError, match=message):
        ours(model, without_blocks("chatml"), record, **spec)


DOUBLED = "{% set x = namespace(t='a') %}{% for a in range(99) %}{% set x.t = MORE %}{% endfor %}{{ x.t }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "goes round more than"),
        ("{{ 'ab' * 99999999 }}", "repeats 99999999 times"),
        ("{{ 9 ** 99999999 }}", "repeats 99999999 times"),
        (
            "{% for a in range(99999) %}{{ messages[0].content }}{{ '%0999d' % 5 }}{% endfor %}",
            "more than 4194304 characters",
        ),
        ("{{ 99999999 * 'ab' }}", "repeats 99999999 times"),
        (DOUBLED.replace("MORE", "x.t ~ x.t"), "makes values of more than"),
        (DOUBLED.replace("MORE", "x.t + x.t"), "makes values of more than"),
        (DOUBLED.replace("MORE", "'%s%s' % (x.t, x.t)"), "makes values of more than"),
        (DOUBLED.replace("MORE", "x.t.replace('a', 'aa')"), "makes values of more than"),
        (DOUBLED.replace("MORE", "x.t | replace('a', 'aa')"), "makes values of more than"),
        (DOUBLED.replace("MORE", "'{0}{0}'.format(x.t)"), "makes values of more than"),
        (DOUBLED.replace("MORE", "[x.t, x.t] | join"), "makes values of more than"),
        (DOUBLED.replace("MORE", "x.t.join([x.t, x.t])"), "makes values of more than"),
        (DOUBLED.replace("MORE", "[x.t, x.t]"), "makes values of more than"),
        (DOUBLED.replace("MORE", "[x.t, x.t]").replace("x.t }}", "x.t | tojson }}"), "makes values of more than"),
        (DOUBLED.replace("MORE", "(x.t,) + (x.t,)").replace("x.t }}", "'' ~ x.t }}"), "makes values of more than"),
        (
            DOUBLED.replace("{% set x.t = MORE %}", "{% set y %}{{ x.t }}{{ x.t }}{% endset %}{% set x.t = y %}"),
            "makes values of more than",
        ),
        ("{{ 'a'.ljust(999999999) }}", "makes a text of 999999999 characters wide"),
        ("{{ 'a' | center(999999999) }}", "makes a text of 999999999 characters wide"),
        ("{{ messages | batch(999999999, 5) | list }}", "makes a text of 999999999 characters wide"),
        ("{{ '{:>999999999}'.format(1) }}", "formats a text wider than 9999"),
        ("{{ '%*d' % (999999999, 1) }}", "formats a text wider than 9999"),
        ("{{ 'a'.translate({97: 'aa'}) }}", "refuses the conversation"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "refuses the conversation .maximum recursion"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "goes round more than",
        ),
        (
            "{% set s = messages[0].content * 9 %}" + "{% for a in s %}" * 9 + "{% endfor %}" * 9,
            "goes round more than",
        ),
        ("{{ [1, 2] | random }}", "refuses|none"),
        ("{{ messages.__class__.__mro__ }}", "refuses the conversation .access to attribute '__class__'"),
        ("{{ messages.append(5) }}", "refuses the conversation"),
        ("{{ raise_exception('no ' + messages[0].role) }}", r"refuses the conversation \(no user\)"),
        ("{{ 'nothing of the assistant' }}", "no learned token"),
    ],
)
def test_a_hostile_template_ends(template: str, message: str, model: str) -> None:
    with pytest.raises((UnfitRecordError, UsageError), match=message):
        ours(model, template, {"messages": [USER, ANSWER, USER, ANSWER]})


TWICE = "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}" + without_blocks(
    "chatml"
)
APART = "{% set all %}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}{% endset %}{{ all }}"
TITLED = "{% for m in messages %}{{ m.content[:1] }}{% endfor %}" + without_blocks("chatml")
CLOSED = without_blocks("chatml").removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TWICE, [OVER, OUT]),
        (APART, ["<assistant>over", "<assistant>out"]),
        (TITLED, None),
        (CLOSED, [OVER, f"{OUT}</s>"]),  # as Phi's
        (THINKING, ["over</s>", "out</s>"]),  # as DeepSeek's
        (with_blocks("chatml").replace("}}{% endgeneration", "}}{% endgeneration %}{% generation %}{{ eos_token }}{% endgeneration"),
         ["over<|im_end|>\n</s>", "out<|im_end|>\n</s>"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("learn", ["assistant", "last"])
def test_a_turn_is_found_wherever_a_template_writes_it(
    learn: str, template: str, expected: list[str] | None, model: str, theirs: Any
) -> None:
    messages = [SYSTEM, USER, {"role": "assistant", "content": "over"}, USER, {"role": "assistant", "content": "out"}]
    if expected is None:
        with pytest.raises(UnfitRecordError, match=r"writes turn [24] otherwise"):
            ours(model, template, {"messages": messages}, learn=learn)
        return
    ids, mask = ours(model, template, {"messages": messages}, learn=learn)
    learned = theirs.decode([one for one, is_in in zip(ids, mask, strict=True) if is_in])
    assert learned == "".join(expected if learn == "assistant" else expected[-1:])


def agents_talk(calls: int) -> list[dict[str, Any]]:
    """One question, then calls and results by turns."""
    return [USER, *(one for number in range(calls) for one in (CALL, RESULT | {"content": f"sun {number}"})), ANSWER]


@pytest.mark.parametrize("long", [None, "truncate", "split"])
def test_a_long_talk_is_rendered_a_few_times(long: str | None, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rendering for each turn would cost the square of their number."""
    written: list[int] = []

    def counted(self: Rendering, messages: Any, *args: Any, **more: Any) -> str:
        written.append(len(messages))
        return rendered(self, messages, *args, **more)

    def sized(self: ModelTokenizer, text: str, **more: Any) -> Any:
        characters.append(len(text))
        return encoded(self, text, **more)

    characters: list[int] = []
    rendered, encoded = Rendering._render, ModelTokenizer.encode_rendered
    monkeypatch.setattr(Rendering, "_render", counted)
    monkeypatch.setattr(ModelTokenizer, "encode_rendered", sized)
    talk = [one for _ in range(20) for one in agents_talk(4)]
    alone = {
        name: Chats(
            chat_spec(template("qwen"), long=long, tokens_max=long and 600), tokenizer_spec(model, eos="</s>")
        ).encode({"messages": talk})
        for name, template in (("blocks", with_blocks), ("none", without_blocks))
    }
    ids, mask, parts, *_ = alone["none"]
    assert parts == alone["blocks"][2]
    assert ids.tolist() == alone["blocks"][0].tolist()
    assert mask.tolist() == alone["blocks"][1].tolist()
    assert sum(written) < {None: 9, "truncate": 3, "split": 5}[long] * len(talk), "of both"
    assert sum(characters) < 2.1 * max(characters), "each is tokenised once"


WORDS = st.text(" \na‿▁é日.", min_size=1, max_size=12)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("flag", ["normalized", "lstrip", "rstrip"])
def test_a_part_has_the_tokens_that_it_has_alone(kind: str, flag: str, tmp_path: Path) -> None:
    model = Tokenizer.from_str(getattr(model_files, kind)())
    flags = {"normalized": False, flag: True}
    model.add_special_tokens([AddedToken(name, **flags) for name in chat_templates.CONTROLS])
    model.save(str(tmp_path / "tokenizer.json"))
    specs = [
        chat_spec(without_blocks(name), tokens=NAMES, date=DAY, long=long, tokens_max=long and 60)
        for name in ("chatml", "mistral", "gemma")
        for long in ("split", None)
    ]
    ways = [Chats(spec, tokenizer_spec(tmp_path / "tokenizer.json", eos="</s>")) for spec in specs]

    @given(st.sampled_from([0, 2, 4]), st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=8), st.booleans())
    @settings(max_examples=15, deadline=None)
    def compare(way: int, exchanges: list[tuple[str, str]], with_head: bool) -> None:
        head = [SYSTEM | {"content": " hm "}] if with_head and not way else []
        talk = [({"role": "user", "content": ask}, {"role": "assistant", "content": said}) for ask, said in exchanges]

        def alone(first: int, last: int) -> Any:
            return ways[way + 1].encode({"messages": [*head, *(one for two in talk[first:last] for one in two)]})

        found = ways[way].encode({"messages": [*head, *(one for two in talk for one in two)]})
        expected, begin = [], 0
        while begin < len(talk):
            sizes = [len(alone(begin, end).ids) for end in range(begin + 1, len(talk) + 1)]
            fit = sum(size <= 60 for size in sizes)
            expected += [alone(begin, begin + fit)] if fit else []
            begin += fit or 1
        if found.documents:
            size = found.documents[-1]
            assert found.ids[:size].tolist() == [one for part in expected for one in part.ids.tolist()]
            assert found.mask[:size].tolist() == [one for part in expected for one in part.mask.tolist()]
        else:
            assert not expected or len(found.ids) <= 60

    compare()


def test_a_template_that_strips_earlier_thoughts_needs_last(model: str, theirs: Any) -> None:
    thought = {**ANSWER, "reasoning_content": "hm"}
    messages = [USER, thought, USER, thought]
    with pytest.raises(UnfitRecordError, match="writes turn 1 otherwise once later ones follow; give learn: last"):
        ours(model, without_blocks("qwen"), {"messages": messages})
    ids, mask = ours(model, without_blocks("qwen"), {"messages": messages}, learn="last")
    assert theirs.decode([one for one, is_in in zip(ids, mask, strict=True) if is_in]).startswith(
        "<think>\nhm\n</think>"
    )


def test_a_template_that_needs_a_day_is_refused_without_one(model: str) -> None:
    with pytest.raises(UsageError, match="writes today's date; add date: 2026-01-01 to chat"):
        ours(model, without_blocks("gpt-oss"), TALKS["one turn"], date=None)
    with pytest.raises(UsageError, match="the date 2026-02-31 of chats is no day"):
        Rendering(chat_spec("a", date="2026-02-31"))
    with pytest.raises(UsageError, match=r"the chat template is none .line 1: .*; fetch it again"):
        Rendering(chat_spec("{% for %}"))


CHAT_PLAN: dict[str, Any] = {
    "output": {"mesh": "dp=1", "sequence_length": 64},
    "tokenizer": {"kind": "huggingface", "file": "tokenizer.json"},
    "sources": {"talks": {"format": "jsonl", "files": "a.jsonl", "chat": "messages"}},
}


@pytest.mark.parametrize(
    ("source", "tokenizer", "message"),
    [
        ({"chat": {"prompt": "a"}}, {}, "prompt and completion stand together; add completion"),
        ({"chat": {"messages": "m", "prompt": "a", "completion": "b"}}, {}, "give one of messages and prompt"),
        ({"chat": {"learn": "user"}}, {}, "unknown way 'user'; known: all, assistant, last"),
        ({"chat": {"date": "today"}}, {}, "'today' is no date; write it as 2026-01-31"),
        ({"chat": "messages", "transform": "a:b"}, {}, "give one of chat and transform"),
        ({"chat": "messages", "text_field": "text"}, {}, "give one of chat and text_field"),
        (
            {"chat": {"learn": "last"}, "long": "split"},
            {},
            "only the last turn is learned, and cut chats lack it; use drop",
        ),
        (
            {"chat": "messages"},
            {"kind": "bytes", "file": None},
            "chats need a model's tokenizer; add tokenizer: {kind:",
        ),
    ],
)
def test_mistakes_of_a_plan_with_chats(source: Any, tokenizer: Any, message: str) -> None:
    named = {key: one for key, one in (CHAT_PLAN["tokenizer"] | tokenizer).items() if one is not None}
    with pytest.raises(UsageError, match=re.escape(message)):
        parsed_plan(
            CHAT_PLAN | {"tokenizer": named, "sources": {"talks": {"format": "jsonl", "files": "a.jsonl"} | source}}
        )


@pytest.mark.parametrize(
    ("source", "long"), [({}, "split"), ({"chat": {"learn": "last"}}, "drop"), ({"pair": {}}, "drop")]
)
def test_what_defaults_say_of_long_documents_holds_for_chats_that_are_cut(source: Any, long: str) -> None:
    chat = {"template": {"enable_thinking": "false", "effort": "high", "n": "1"}, "stop": "<|im_end|>"}
    talks = {**CHAT_PLAN["sources"]["talks"], "chat": chat, **source}
    plan = parsed_plan(CHAT_PLAN | {"sources": {"talks": talks}, "defaults": {"long": "split"}})
    assert plan_digest(plan_of_text(plan_text(plan))) == plan_digest(plan)
    kept = json.loads(plan_text(plan))["sources"]["talks"]
    assert kept["long"] == long
    if not source:
        assert kept["chat"]["template"] == {"enable_thinking": False, "effort": "high", "n": 1}


@pytest.mark.parametrize("chat", [{"prompt": "a", "completion": "b"}, {"messages": "m"}])
@pytest.mark.parametrize("long", ["drop", "truncate", "split"])
def test_a_kept_plan_with_settings_of_chats_is_read_again(chat: Any, long: str) -> None:
    source = {"format": "jsonl", "files": "a.jsonl", "chat": chat, "long": long}
    plan = parsed_plan(CHAT_PLAN | {"sources": {"talks": source}})
    assert plan_digest(plan_of_text(plan_text(plan))) == plan_digest(plan)
    assert json.loads(plan_text(plan))["sources"]["talks"]["long"] == long


def turns(*words: str) -> list[dict[str, str]]:
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": one} for place, one in enumerate(words)]


LONG_TALK = turns("a", "1" * 20, "b", "2" * 20, "c", "3" * 90, "d", "4" * 20, "e")


@pytest.mark.parametrize("template", [with_blocks("chatml"), without_blocks("chatml")])
@pytest.mark.parametrize(
    ("long", "room", "kept", "lost"),
    [
        ("truncate", 2, [LONG_TALK[:4]], LONG_TALK),
        ("truncate", 1, [LONG_TALK[:2]], LONG_TALK),
        ("split", 2, [LONG_TALK[:4], LONG_TALK[6:]], None),
        ("split", 1, [LONG_TALK[:2], LONG_TALK[2:4], LONG_TALK[6:8]], None),
    ],
)
def test_a_chat_longer_than_a_row_is_cut_between_turns(
    long: str, room: int, kept: Any, lost: Any, template: str, model: str
) -> None:
    def encoded(messages: Any, **more: Any) -> Any:
        spec = chat_spec(template, **more)
        return Chats(spec, tokenizer_spec(model, eos="</s>")).encode({"messages": [SYSTEM, *messages]})

    whole, _, none, *_ = encoded(LONG_TALK)
    assert none == ()
    most = len(encoded(LONG_TALK[: 2 * room])[0])
    ids, mask, ends, *_ = encoded(LONG_TALK, long=long, tokens_max=most)
    expected = [encoded(one)[:2] for one in kept]
    parts = [len(one) for one, _ in expected]
    assert ends == [*accumulate(parts)]
    assert max(parts) <= most
    assert ids[: sum(parts)].tolist() == [one for part, _ in expected for one in part.tolist()]
    assert mask[: sum(parts)].tolist() == [one for _, part in expected for one in part.tolist()]
    if lost is not None:
        assert ids.tolist() == whole.tolist()
    else:
        assert len(ids) > sum(parts) + 90  # what fits nowhere is counted
    assert encoded(LONG_TALK, long=long, tokens_max=len(whole))[2] == ()
    nothing = encoded(turns("a", "b" * 200), long=long, tokens_max=50)
    assert sum(nothing[2]) == 0
    assert nothing[1].any()


def test_the_template_is_found_beside_the_tokenizer(tmp_path: Path) -> None:
    spec = tokenizer_spec(tmp_path / "tokenizer.json").tokenizer
    with pytest.raises(UsageError, match=r"no chat template beside .*; add chat_template: FILE to tokenizer"):
        templates_of(spec, str)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "of the config"}))
    assert templates_of(spec, str) == ("of the config", None)
    several = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "a"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert templates_of(spec, str) == ("a", "b")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("beside, with tools")
    with pytest.raises(UsageError, match=r"no chat template beside .*, but tool_use; add chat_template: FILE"):
        templates_of(spec, str)
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert templates_of(spec, str) == ("beside", "beside, with tools")
    (tmp_path / "own.jinja").write_text("of a name")
    named = spec.changed(chat_template="own.jinja")
    assert templates_of(named, lambda name: str(tmp_path / name)) == Templates("of a name")
    assert templates_of(spec.changed(chat_template="{{ inline }}"), str) == Templates("{{ inline }}")
    with pytest.raises(AbsentError, match="no such chat template"):
        templates_of(spec.changed(chat_template="none.jinja"), str)


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
FOLDERS = {
    "config": ({**FAST, "bos_token": {"__type": "AddedToken", "content": "<s>"}, "add_bos_token": True}, {}, "[<s>|]"),
    "map": ({**FAST}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}, "[<s>|</s>]"),
    "map beside the tokens' list": ({**FAST, "added_tokens_decoder": {}, "bos_token": "</s>"}, {"bos_token": "<s>"}, "[</s>|]"),
    "class": ({"tokenizer_class": "LlamaTokenizerFast"}, {}, "[<s>|</s>]"),
    "null": ({"tokenizer_class": "LlamaTokenizer", "eos_token": None}, {}, "[<s>|]"),
    "Qwen": ({"tokenizer_class": "Qwen2Tokenizer"}, {}, "[|<|endoftext|>]"),
    "extra": ({**FAST, "extra_special_tokens": {"bos_token": "<|im_start|>"}}, {}, "[<|im_start|>|]"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_template_knows_the_tokens_of_a_models_folder(name: str, model: str, tmp_path: Path) -> None:
    config, beside, expected = FOLDERS[name]
    of_class = config["tokenizer_class"].startswith("Llama")
    (tmp_path / "tokenizer.json").write_text(model_files.llama() if of_class else Path(model).read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if beside:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(beside))
    tokens = special_tokens(tokenizer_spec(tmp_path / "tokenizer.json").tokenizer)
    template = "[{{ bos_token }}|{{ eos_token }}]"
    given = dict.fromkeys(("bos_token", "eos_token")) | dict(tokens)
    assert Rendering(chat_spec(template, tokens=tuple(given.items()))).text_of([], Given()) == expected
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    assert theirs.apply_chat_template([USER], chat_template=template, tokenize=False) == expected


def test_a_token_that_a_template_names_and_nothing_defines_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"names bos_token, .*; write the token, or null .* into tokenizer_config.json"
    ):
        Rendering(chat_spec("{{ bos_token }}{{ eos_token }}", tokens=(("eos_token", "</s>"),)))
    Rendering(chat_spec("{{ bos_token }}{% set my_token = 'a' %}{{ my_token }}", tokens=(("bos_token", None),)))


ENDLESS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("template", "stop", "ending", "learned"),
    [
        (with_blocks("chatml"), (), Ending("<|im_end|>", True), [OVER, OUT]),
        (ENDLESS, (), Ending("<|user|>", False), ["over", "out"]),
        (ENDLESS, ("<|user|>",), Ending("<|user|>", True), ["over<|user|>", "out<|user|>"]),
        (ENDLESS.replace("<|", "[").replace("|>", "]"), (), Ending(None, False), None),
        (ENDLESS.replace("<|", "[").replace("|>", "]"), ("</s>",), Ending("</s>", True), ["over", "out</s>"]),
    ],
)
def test_the_end_of_an_answer_is_told_and_may_be_added(
    template: str, stop: tuple[str, ...], ending: Ending, learned: Any, model: str, theirs: Any
) -> None:
    spec = chat_spec(template, tokens=NAMES, date=DAY, stop=stop or None)
    chats = Chats(spec, tokenizer_spec(model, eos="</s>"))
    assert chats.ending() == ending
    if learned is not None:
        messages = [USER, {"role": "assistant", "content": "over"}, USER, {"role": "assistant", "content": "out"}]
        ids, mask, *_ = chats.encode({"messages": messages})
        text = theirs.decode([one for one, is_in in zip(ids, mask, strict=True) if is_in])
        assert text == "".join(learned)
