"""Conversations by transformers' `apply_chat_template` and by a plan: the same ids and masks."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
import torch
from chat_templates import with_blocks
from declared import tokenizer_spec
from oracles import Case, Documents, ask, kept, ours, pictures, written
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
SHOWN = CHATML.replace(
    "{{ m['content'] + '<|im_end|>\\n' }}{% endif %}",
    "{% for p in m['content'] %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}",
)
IMAGE = {"type": "image"}
SHOWS: Any = {"chat": {}, "images": {"fields": "images", "patches_min": 16, "patches_max": 5120}}
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
    "an image": Case(
        {"messages": [USER | {"content": [IMAGE, *PARTED]}, ANSWER]}, SHOWS, SHOWN, images=[(70, 50)]
    ),
    "images of several turns": Case(
        {"messages": [USER | {"content": [IMAGE, *PARTED, IMAGE]}, ANSWER, USER | {"content": [*PARTED, IMAGE]}, ANSWER]},
        SHOWS, SHOWN, images=[(140, 98), (9, 40), (300, 31)],
    ),
    "an image that is made smaller": Case(
        {"messages": [USER | {"content": [*PARTED, IMAGE]}, ANSWER]},
        {"chat": {}, "images": {"fields": "images", "patches_min": 16, "patches_max": 64}},
        SHOWN, images=[(711, 500)], theirs={"size": {"shortest_edge": 3136, "longest_edge": 64 * 196}},
    ),
    "an image, and a token's name": Case(
        {"messages": [USER | {"content": [IMAGE, {"type": "text", "text": "<|im_end|>é</s>"}]}, ANSWER]}, SHOWS, SHOWN, images=[(56, 84)],
        tokenizer={"control_tokens": "tokens"},
    ),
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


def by_processor(case: Case, folder: Path, **options: Any) -> Any:
    """Qwen2-VL's, but for videos, whose processor needs torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: PLC0415
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor  # noqa: PLC0415

    class OfImages(Qwen2VLProcessor):  # type: ignore[misc]
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
        ) -> None:
            super(Qwen2VLProcessor, self).__init__(image_processor, tokenizer, chat_template=chat_template)
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(self.image_token), -1

    processor = OfImages(
        Qwen2VLImageProcessorPil(**case.theirs, **options), AutoTokenizer.from_pretrained(str(folder)), case.template
    )
    left = pictures(case)
    talk = [
        one if isinstance(one["content"], str) else one | {"content": [part | ({"image": left.pop(0)} if part == IMAGE else {}) for part in one["content"]]}
        for one in case.record["messages"]
    ]  # fmt: skip
    return processor.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)


def theirs(case: Case, folder: Path) -> Documents:
    if case.images:
        found = by_processor(case, folder, do_rescale=False, do_normalize=False)
        pixels = found["pixel_values"].reshape(-1, 3, 2, 14, 14)[:, :, 0].transpose(0, 2, 3, 1).astype(np.uint8)
        more = [found["image_grid_thw"].ravel().tolist(), [zlib.crc32(pixels.tobytes())]]
        return [[list(found["input_ids"][0]), list(found["assistant_masks"][0]), *more]]
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


@pytest.mark.nightly
def test_the_page_says_how_pixels_become_those_of_the_model(tmp_path: Path) -> None:
    case = CASES["images of several turns"]
    found = by_processor(case, written(case, tmp_path), image_mean=[0.4, 0.5, 0.6], image_std=[0.3, 0.2, 0.1])
    raw = by_processor(case, tmp_path, do_rescale=False, do_normalize=False)["pixel_values"]
    pixels = raw.reshape(-1, 3, 2, 14, 14)[:, :, 0].transpose(0, 2, 3, 1).reshape(len(raw), -1)
    page = (Path(__file__).resolve().parents[2] / "producer/PAYLOADS.md").read_text()
    scope: dict[str, Any] = {"torch": torch}
    exec(re.findall(r"```python\n(def pixel_values.*?)```", page, re.DOTALL)[0], scope)
    ours = scope["pixel_values"]({"pixels": torch.from_numpy(pixels).to(torch.uint8)}, [0.4, 0.5, 0.6], [0.3, 0.2, 0.1])
    assert np.allclose(ours.numpy(), found["pixel_values"], atol=1e-5)


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
