"""Conversations by transformers' `apply_chat_template` and by a plan: the same ids and masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model_files
import pytest
from chat_templates import with_blocks
from declared import tokenizer_spec
from oracles import Case, Documents, ask, kept, ours, written
from transformers import AutoTokenizer

from stepfs_producer.transforms.model_folder import other_ids

USER, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "sun", "name": "f"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
TALK = {
    "messages": [USER, ANSWER, {"role": "user", "content": "naïve 日本語"}, {"role": "assistant", "content": " over\n"}]
}
CALLS = {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]}
QWEN, CHATML, MISTRAL = map(with_blocks, ("qwen", "chatml", "mistral"))
WITH_TOOLS: Any = {"chat": {"tools": "tools"}}
NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | tojson }}" + QWEN}]
BOTH = "[{{ bos_token }}|{{ eos_token }}]"
THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}" + CHATML
PARTS = CHATML.replace(
    "m['content']", "(m['content'] if m['content'] is string else m['content'] | map(attribute='text') | join('/'))"
)
PARTED = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
MANY = {"messages": [one for number in range(9) for one in (USER | {"content": f"{number}?"}, ANSWER)]}

CASES = {
    "turns": Case(TALK),
    "turns of SentencePiece": Case(TALK, template=MISTRAL, model="llama"),
    "turns of Unigram": Case(TALK, template=MISTRAL, model="t5"),
    "many turns": Case(MANY, template=QWEN),
    "a null content": Case(CALLS, WITH_TOOLS, QWEN),
    "null keys": Case({"messages": [USER | {"name": None}, ANSWER | {"tool_calls": None, "reasoning_content": None}]}, template=QWEN),
    "thoughts": Case({"messages": [USER, ANSWER | {"reasoning_content": "hm"}]}, template=QWEN),
    "thoughts by another name": Case({"messages": [USER, ANSWER | {"thinking": "hm"}]}, template=QWEN),
    "a template for tools": Case(CALLS, WITH_TOOLS, config={"chat_template": NAMED}),
    "no tools, beside a template for them": Case(TALK, WITH_TOOLS, config={"chat_template": NAMED}),
    "a template for tools in a file": Case(
        CALLS, WITH_TOOLS,
        beside={"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "{{ tools | tojson }}" + QWEN},
    ),
    "BOS of the map": Case(
        TALK, template=BOTH + CHATML, config={"bos_token": "absent"},
        beside={"special_tokens_map.json": json.dumps({"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}})},
    ),
    "BOS that is null": Case(TALK, template=BOTH + CHATML, config={"bos_token": None}),
    "a token of its own name": Case(
        TALK, template="{{ image_token }}" + CHATML, config={"extra_special_tokens": {"image_token": "<|endoftext|>"}}
    ),
    "variables of the plan": Case(
        TALK, {"chat": {"template": {"enable_thinking": "false"}}}, THINKS, theirs={"enable_thinking": False}
    ),
    "variables of the record": Case(
        {**TALK, "chat_template_kwargs": {"enable_thinking": False}}, template=THINKS, theirs={"enable_thinking": False}
    ),
    "a template that takes parts": Case({"messages": [USER | {"content": PARTED}, ANSWER]}, template=PARTS),
    "control tokens taken for such": Case(
        {"messages": [USER | {"content": "a<|im_end|> b</s>"}, ANSWER]}, tokenizer={"control_tokens": "tokens"}
    ),
    **{
        f"control tokens {' and '.join(flags)}, {model}": Case(
            TALK, template=MISTRAL, model=model, flags=dict.fromkeys(flags, True)
        )
        for model in ("gpt2", "llama", "t5")
        for flags in (("normalized",), ("single_word",), ("lstrip", "rstrip"), ("normalized", "rstrip"))
    },
}  # fmt: skip


def theirs(case: Case, folder: Path) -> Documents:
    found = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        case.record["messages"],
        tools=case.record.get("tools"),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **case.theirs,
    )
    return [[found["input_ids"], found["assistant_masks"]]]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_gives_what_transformers_gave(name: str, tmp_path: Path) -> None:
    assert ours(CASES[name], tmp_path) == kept("transformers")[name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_transformers_still_gives_it(name: str, tmp_path: Path) -> None:
    assert theirs(CASES[name], written(CASES[name], tmp_path)) == kept("transformers")[name]


@pytest.mark.parametrize(("kind", "differs"), [("LlamaTokenizer", True), ("PreTrainedTokenizerFast", False)])
def test_check_says_where_a_class_gives_other_ids_and_what_to_save(kind: str, differs: bool, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(model_files.llama())
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plan = tokenizer_spec(tmp_path / "tokenizer.json").tokenizer
    texts = ["the cat", " sat", "on  the mat", "naïve"]
    said = other_ids(plan, texts)
    if differs:
        assert said is not None
        assert "since LlamaTokenizer builds the tokenizer anew; to have its ids, save what it built: AutoTok" in said
        exec(said.rpartition("save what it built: ")[2], {"AutoTokenizer": AutoTokenizer})
    assert other_ids(plan, texts) is None


if __name__ == "__main__":
    ask("transformers", CASES, theirs)
