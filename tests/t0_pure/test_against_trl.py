"""Conversations, completions and preferences by trl's trainers and by a plan: the same ids, masks and borders.

Its 72 templates are read from its package, and need transformers alone: each night, ids and masks of some talks.
"""

from __future__ import annotations

import datetime as dt
import logging
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_templates import with_blocks, without_blocks
from declared import chat_spec, tokenizer_spec
from oracles import Case, Documents, ask, kept, ours, written

from stepfs_producer.transforms.chat import Chats
from stepfs_producer.transforms.documents import UnfitRecordError

PAIR: Any = {"pair": {}}
CHATS: Any = {"pair": {}, "chat": {}}
LABELS: Any = {"pair": {"label": "label"}}
ANSWERED: Any = {"chat": {"prompt": "prompt", "completion": "completion"}}


def asks(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answers(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "be brief"}
CALL = answers(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}])
TEXTS = [
    ("What color is the sky?", " It is blue.", " It is green."),
    ("Q: one and one\nA:", "two", "three"),
    ("Human: hello\n\nAssistant: ", "hello, how are you", "go away"),
    ("say 12", "34", "56"),
    ("def f(x):\n    return", " x + 1\n", "\n    x"),
    ("the", "re", "m"),
]
THINKS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
DEEPSEEK = THINKS.replace("m.content +", "(m.content.split('</think>')[-1]) +")
OFF = "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>' }}{% endif %}"

PREFERENCES: dict[str, dict[str, Any]] = {
    "a prompt of messages": {"prompt": [asks("the cat")], "chosen": [answers("sat")], "rejected": [answers("ran")]},
    "whole conversations": {"chosen": [asks("the cat"), answers("sat")], "rejected": [asks("the cat"), answers("ran")]},
    "UltraFeedback": {"prompt": "the cat", "chosen": [asks("the cat"), answers("sat")], "rejected": [asks("the cat"), answers("ran")]},
    "several turns": {"prompt": [SYSTEM, asks("a"), answers("b"), asks("c")], "chosen": [answers("d")], "rejected": [answers("e")]},
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    "a completion": {"prompt": [asks("one?")], "completion": [answers("1")]},
    "a history in the prompt": {"prompt": [asks("one?"), answers("WEAK MODEL"), asks("two?")], "completion": [answers("2")]},
    "a system's message": {"prompt": [SYSTEM, asks("one?")], "completion": [answers("1")]},
    "an answer like the generation prompt": {"prompt": [asks("one?")], "completion": [answers("<b>1</b>")]},
    "variables": {"prompt": [asks("one?")], "completion": [answers("1")], "chat_template_kwargs": {"enable_thinking": False}},
}  # fmt: skip
CASES = {
    **{
        f"texts {number}, {model}": Case(
            {"prompt": prompt, "chosen": chosen, "rejected": rejected}, PAIR, model=model, tokenizer=ends, theirs={"trainer": "DPO"}
        )
        for model, ends in (("gpt2", {}), ("llama", {"bos": "<s>"}))  # as its file adds it
        for number, (prompt, chosen, rejected) in enumerate(TEXTS)
    },
    **{
        f"a labelled text {number}, {model}": Case(
            {"prompt": prompt, "completion": good if label else poor, "label": label}, LABELS, model=model, tokenizer=ends, theirs={"trainer": "KTO"}
        )
        for model, ends in (("gpt2", {}), ("llama", {"bos": "<s>"}))
        for number, ((prompt, good, poor), label) in enumerate(zip(TEXTS, (True, False, 1, 0, True, False), strict=True))
    },
    "texts without a prompt": Case(
        {"chosen": "say 12 and 13", "rejected": "say 12 or"}, PAIR, theirs={"trainer": "DPO"}
    ),
    **{
        f"{name}, {kind}": Case(record, source, template, theirs={"trainer": trainer})
        for trainer, source, records in (
            ("DPO", CHATS, PREFERENCES),
            ("SFT", ANSWERED, COMPLETIONS),
            ("KTO", LABELS | {"chat": {}}, {f"{name}, labelled": {**one, "label": not number % 2} for number, (name, one) in enumerate(COMPLETIONS.items())}),
        )
        for name, record in records.items()
        for kind, template in (("ChatML", OFF + without_blocks("chatml")), ("DeepSeek", DEEPSEEK), ("Mistral", without_blocks("mistral")))
        if kind != "Mistral" or str(SYSTEM) not in str(record)
    },
    **{
        f"{name}, assistant_only_loss": Case(record, source, with_blocks("qwen"), theirs={"trainer": "SFT", "assistant_only_loss": True})
        for name, source, record in (
            ("a talk", {"chat": {}}, {"messages": [asks("one?"), answers("1"), asks("two?"), answers("2")]}),
            ("calls", {"chat": {"tools": "tools"}}, {"messages": [asks("?"), CALL, {"role": "tool", "content": "x"}, answers("y")], "tools": [{"type": "function", "function": {"name": "f"}}]}),
            ("a history", ANSWERED, {"prompt": [asks("one?"), answers("WEAK"), asks("two?")], "completion": [answers("2")]}),
            ("tools' results in a completion", ANSWERED, {"prompt": [asks("one?")], "completion": [CALL, {"role": "tool", "content": "x"}, answers("y")]}),
        )
    },
}  # fmt: skip


def theirs(case: Case, folder: Path) -> Documents:
    import trl  # noqa: PLC0415 - the push does without
    from datasets import Dataset, disable_caching, disable_progress_bars  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415
    from trl.data_utils import maybe_extract_prompt  # noqa: PLC0415

    logging.getLogger("trl").setLevel(logging.ERROR)  # it warns where a prompt's end is left out
    disable_caching()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    options = dict(case.theirs)
    trainer = options.pop("trainer")
    data = Dataset.from_list([dict(case.record)], on_mixed_types="use_json")
    args = getattr(trl, f"{trainer}Config")(str(folder), bf16=False, use_cpu=True, max_length=None, **options)
    prepare = getattr(trl, f"{trainer}Trainer")._prepare_dataset
    fake = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss="completion" in case.record, calculate_KL=False
    )
    if trainer == "SFT":
        (row,) = prepare(fake, data, tokenizer, args, packing=False, formatting_func=None, dataset_name="x")
        return [[row["input_ids"], [int(label != -100) for label in row["labels"]]]]
    (row,) = prepare(fake, data.map(maybe_extract_prompt), tokenizer, args, dataset_name="x")
    prompt = row["prompt_ids"]
    if trainer == "KTO":
        answer, side = row["completion_ids"], 1 if row["label"] else 2
        return [[prompt + answer, [0] * len(prompt) + [1] * len(answer), [side]]]
    return [[prompt + row[one], [0] * len(prompt) + [1] * len(row[one])] for one in ("chosen_ids", "rejected_ids")]


@pytest.mark.parametrize("name", CASES)
def test_a_plan_gives_what_trl_gave(name: str, tmp_path: Path) -> None:
    assert ours(CASES[name], tmp_path) == kept("trl")[name]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CASES)
def test_trl_still_gives_it(name: str, tmp_path: Path) -> None:
    assert theirs(CASES[name], written(CASES[name], tmp_path)) == kept("trl")[name]


SKY = [asks("What color is the sky?"), answers("It is blue.")]
LOOK = answers(
    "", tool_calls=[{"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}]
)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}, "required": ["at"]}
LOOKS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}]
TALKS: Any = {
    "one turn": {"messages": SKY},
    "two turns": {"messages": [*SKY, asks("And the sea?"), answers("Blue, too.")]},
    "a system's message": {"messages": [SYSTEM, *SKY]},
    "thoughts": {"messages": [SKY[0], SKY[1] | {"reasoning_content": "Rayleigh."}]},
    "tools": {"messages": [SKY[0], LOOK, {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "blue"}, SKY[1]], "tools": LOOKS},
}  # fmt: skip
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "unk_token": None, "image_token": None}


@pytest.mark.nightly
@pytest.mark.parametrize("talk", TALKS)
def test_a_template_of_trls_is_rendered_as_by_transformers(talk: str, tmp_path: Path) -> None:
    """What is learned is in what trl's own variant learns: that has parts of the generation prompt, too. What is refused is
    taken as the message advises.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(str(written(Case({}), tmp_path)))
    apply = partial(
        tokenizer.apply_chat_template, TALKS[talk]["messages"], tools=TALKS[talk].get("tools"), return_dict=True
    )
    day = dt.datetime.now(dt.UTC).date().isoformat()

    def ours_of(template: str, learn: str = "assistant") -> tuple[list[int], list[int]]:
        spec = chat_spec(template, tokens=tuple(NAMES.items()), tools="tools", learn=learn, date=day)
        ids, mask, *_ = Chats(spec, tokenizer_spec(tmp_path / "tokenizer.json", eos="</s>")).encode(TALKS[talk])
        return ids.tolist(), mask.tolist()

    compared = refused = 0
    package = find_spec("trl")
    assert package is not None
    for path in sorted((Path(package.origin or "").parent / "chat_templates").glob("*.jinja")):
        template, variant = path.read_text(), path.with_name(f"{path.stem}_training.jinja")
        try:
            expected = apply(chat_template=template)["input_ids"]
        except Exception:  # noqa: BLE001 - of templates: no system, no tools
            with pytest.raises(UnfitRecordError, match="the chat template refuses the conversation"):
                ours_of(template)
            continue
        try:
            ids, mask = ours_of(template)
        except UnfitRecordError as error:
            assert "give learn: last, or a template with {% generation %} blocks" in str(error)  # noqa: PT017
            assert ours_of(template, "last")[0] == expected
            refused += 1
            continue
        assert ids == expected, path.stem
        if variant.exists():
            by_variant = apply(chat_template=variant.read_text(), return_assistant_tokens_mask=True)
            # One asks for the answer to a tool's result by nothing, and writes a header before it, which is then learned.
            if by_variant["input_ids"] == ids and (path.stem, talk) != ("diffusion_gemma", "tools"):
                assert all(one <= other for one, other in zip(mask, by_variant["assistant_masks"], strict=True)), (
                    path.stem
                )
        compared += 1
    assert compared > 50
    assert refused < 10


if __name__ == "__main__":
    ask("trl", CASES, theirs)
