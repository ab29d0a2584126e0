"""Chats, by CPU time, which a busy machine bears: talks rendered by us and by transformers, and a plan of chats against
`datasets.map` with trl's packing, which `scripts/setup --nightly` brings.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chat_templates import with_blocks, without_blocks
from tokenizers import Tokenizer

from bench.machine import program
from bench.machine import run as run_command
from bench.report import Report, at_least, at_most, load, median
from bench_plan.corpora import write_bpe
from bench_plan.lengths import prose_texts
from stepfs_producer.plan.sources import Chat
from stepfs_producer.plan.sources import Tokenizer as PlanTokenizer
from stepfs_producer.transforms.chat import Chats
from stepfs_producer.transforms.documents import ChatSpec, TokenizerSpec
from stepfs_producer.transforms.model_folder import Templates

WORKERS = 2
LENGTH = 4096
RENDERED, PLANNED, CUT = 0.8, 1.0, 2.0
_NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
_CONTROLS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
PLAN = """
version: 1
output: {{mesh: "dp=2", sequence_length: {length}, micro_batch_tokens: 16384}}
tokenizer: {{kind: huggingface, file: {folder}/tokenizer.json, eos: "<|im_end|>"}}
sources: {{talks: {{format: jsonl, files: {folder}/talks/, chat: messages, epochs: 1}}}}
"""


def run(report: Report, directory: Path, *, quick: bool) -> None:
    talks = write(directory, 300 if quick else 3000)
    rounds = 1 if quick else 5
    for kind in ("chatml", "llama", "gemma", "qwen"):
        _render(report, directory, kind, talks[:300], rounds)
        _cut(report, directory, kind, [turn for talk in talks[:300] for turn in talk][:600], rounds)
    if find_spec("trl") is None:
        report.say("a plan against trl is left out; scripts/setup --nightly brings that")
    else:
        _plan(report, directory, len(talks), rounds)


def write(directory: Path, count: int) -> list[list[dict[str, str]]]:
    """A model's folder, and talks of 2 to 10 turns in files beside it."""
    write_bpe(directory / "tokenizer.json")
    model = Tokenizer.from_file(str(directory / "tokenizer.json"))
    model.add_special_tokens(list(_CONTROLS))
    model.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **_NAMES, "chat_template": with_blocks("qwen")}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    draw, texts = random.Random(1), [text[:1200] for text in islice(prose_texts(), 4000)]
    talks = [
        [
            {"role": ("user", "assistant")[turn % 2], "content": draw.choice(texts)}
            for turn in range(2 * draw.randint(1, 5))
        ]
        for _ in range(count)
    ]
    (directory / "talks").mkdir()
    for part in range(8):
        lines = [json.dumps({"messages": talk}) for talk in talks[part::8]]
        (directory / f"talks/{part}.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "plan.yaml").write_text(PLAN.format(length=LENGTH, folder=directory))
    return talks


def _render(report: Report, directory: Path, kind: str, talks: list[list[dict[str, str]]], rounds: int) -> None:
    """Ids and masks of each talk by a template without blocks, against ids by one `apply_chat_template`, and against those
    that would tell the masks: one more for each answer, of the turns before it. In turns.
    """
    template, ours, theirs = _both(directory, kind)
    sides: dict[str, Callable[[Any], Any]] = {
        "ours": lambda talk: ours.encode({"messages": talk}).ids,
        "theirs": lambda talk: theirs.apply_chat_template(talk, chat_template=template, return_dict=True)["input_ids"],
        "masks": lambda talk: [
            theirs.apply_chat_template(talk[:turn], chat_template=template, add_generation_prompt=turn < len(talk))
            for turn in (*range(1, len(talk), 2), len(talk))
        ],
    }
    assert kind == "llama" or sides["ours"](talks[0]).tolist() == sides["theirs"](talks[0]), "llama writes the day"
    used = _in_turns(sides, talks, rounds)
    report.figures.setdefault("chats", {})[kind] = {"cpu_s": used, "talks": len(talks), "load": load()}
    rate = {side: len(talks) / median(seconds) for side, seconds in used.items()}
    what = f"talks rendered, with masks, {kind} without blocks, per CPU-s"
    for side, against in (("theirs", "apply_chat_template, without masks"), ("masks", "one for each answer, and one")):
        ratio = median([their / our for our, their in zip(used["ours"], used[side], strict=True)])
        report.add(at_least(RENDERED, what, f"{rate['ours']:.0f}", f"{against} {rate[side]:.0f}", ratio))


def _cut(report: Report, directory: Path, kind: str, talk: list[dict[str, str]], rounds: int) -> None:
    """A talk of many turns by `long: split`, against one `apply_chat_template` of the whole."""
    template, ours, theirs = _both(directory, kind, LENGTH)
    sides: dict[str, Callable[[Any], Any]] = {
        "ours": lambda talk: ours.encode({"messages": talk}),
        "theirs": lambda talk: theirs.apply_chat_template(talk, chat_template=template, return_dict=True),
    }
    parts = sides["ours"](talk).parts
    used = _in_turns(sides, [talk], rounds)
    report.figures["chats"][f"{kind}, cut"] = {"cpu_s": used, "parts": parts, "load": load()}
    ms = {side: 1000 * median(seconds) for side, seconds in used.items()}
    ratio = median([our / their for our, their in zip(used["ours"], used["theirs"], strict=True)])
    what = f"a talk of {len(talk)} turns in {len(parts)} parts, {kind} without blocks, CPU"
    report.add(at_most(CUT, what, f"{ms['ours']:.0f} ms", f"apply_chat_template, whole, {ms['theirs']:.0f} ms", ratio))


def _both(directory: Path, kind: str, tokens_max: int | None = None) -> tuple[str, Chats, Any]:
    template = without_blocks(kind)
    spec = ChatSpec(Chat(date="2026-01-01"), Templates(template), tuple(_NAMES.items()), tokens_max)
    file = PlanTokenizer(kind="huggingface", file=str(directory / "tokenizer.json"), eos="<|im_end|>")
    theirs = import_module("transformers").AutoTokenizer.from_pretrained(str(directory))
    return template, Chats(spec, TokenizerSpec(file)), theirs


def _in_turns(sides: dict[str, Callable[[Any], Any]], talks: list[Any], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each side, round by round."""
    used: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            began = time.process_time()
            for talk in talks:
                sides[side](talk)
            used[side].append(time.process_time() - began)
    return used


def _plan(report: Report, directory: Path, count: int, rounds: int) -> None:
    used: dict[str, list[float]] = {"lake": [], "trl": []}
    took: dict[str, list[float]] = {"lake": [], "trl": []}
    for number in range(rounds):
        for side in ("lake", "trl") if number % 2 else ("trl", "lake"):
            lake = directory / f"lake-{number}"
            order = {"side": side, "plan": str(directory / "plan.yaml"), "lake": f"file://{lake}", "workers": WORKERS}
            module = "bench_plan.chats" if side == "trl" else "bench_plan.sides"
            answer = json.loads(run_command(program(module, json.dumps(order))).stdout.splitlines()[-1])
            used[side].append(answer["cpu_s"])
            took[side].append(answer["seconds"])
        run_command(["rm", "-r", str(lake)])
    report.figures["chats"]["plan"] = {"cpu_s": used, "seconds": took, "talks": count, "load": load()}
    rate = {side: count / median(seconds) for side, seconds in used.items()}
    ratios = [their / our for our, their in zip(used["lake"], used["trl"], strict=True)]
    what = f"talks of a plan into a lake, {WORKERS} workers, per CPU-s"
    against = f"datasets.map and packing of trl, {WORKERS} processes, {rate['trl']:.0f}"
    report.add(at_least(PLANNED, what, f"{rate['lake']:.0f}", against, median(ratios)))


def by_trl(order: dict[str, Any]) -> dict[str, float]:
    """What `SFTTrainer` does before the first step, by its own function: render, tokenise, mask, pack."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in our workers
    trl, datasets, transformers = map(import_module, ("trl", "datasets", "transformers"))
    logging.getLogger("trl").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    folder, cache = Path(order["plan"]).parent, order["lake"].removeprefix("file://")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    args = trl.SFTConfig(
        cache, bf16=False, use_cpu=True, max_length=LENGTH, assistant_only_loss=True, dataset_num_proc=order["workers"],
    )  # fmt: skip
    fake = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)
    began, cpu = time.perf_counter(), _cpu_s()
    data = datasets.load_dataset("json", data_files=f"{folder}/talks/*.jsonl", split="train", cache_dir=cache)
    prepare: Any = trl.SFTTrainer._prepare_dataset  # noqa: SLF001 - it is what the trainer does
    prepare(fake, data, tokenizer, args, packing=True, formatting_func=None, dataset_name="talks")
    return {"seconds": time.perf_counter() - began, "cpu_s": _cpu_s() - cpu}


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    print(json.dumps(by_trl(json.loads(sys.argv[1]))))
