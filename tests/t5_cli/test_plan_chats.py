"""A whole run over chats: from messages.jsonl and a model's files to masked labels, the same after kill -9."""

from __future__ import annotations

import json
from pathlib import Path

import chat_templates
import model_files
import pytest
from committed import committed
from planned_lake import produce
from safetensors.numpy import load
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(600)  # a run takes seconds, and minutes beside many others

PLAN = """\
version: 1
output: {mesh: "dp=2", sequence_length: 128, labels: same}
tokenizer: {kind: huggingface, file: tokenizer.json}
sources: {talks: {format: jsonl, files: messages.jsonl, chat: messages, epochs: 1, shuffle: none}}
until: {exhausted: all, last: pad}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens(chat_templates.CONTROLS)
    model.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": chat_templates.without_blocks("chatml")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    talks = [
        [
            {"role": "user", "content": f"{number} <|im_end|>?"},
            {"role": "assistant", "content": f"answer {number}"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "x" * (400 if number == 7 else 3)},
        ]
        for number in range(40)
    ]
    (tmp_path / "messages.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("file: tokenizer.json", "file: tokenizer.json, eos: <|im_end|>"))
    return path


def test_each_answer_is_learned_and_nothing_else(plan: Path, tmp_path: Path) -> None:
    checked = produce("check", plan)
    assert checked.returncode == 0, checked.stderr
    assert "≈ 32.3%" in next(line for line in checked.stdout.splitlines() if line.startswith("talks "))
    lake = f"file://{tmp_path}/lake"
    done = produce("run", plan, lake, "--json")
    assert done.returncode == 0, done.stderr
    model = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    learned = []
    for _, files in committed(lake):
        for file in map(load, files):
            for ids, labels, documents in zip(
                *(file[name] for name in ("input_ids", "labels", "doc_ids")), strict=True
            ):
                for document in range(documents.max() + 1):
                    kept = ids[(documents == document) & (labels != -100)]
                    learned.append(model.decode(kept.tolist(), skip_special_tokens=False))
    expected = [f"answer {number}<|im_end|>\nxxx<|im_end|>\n" for number in range(40) if number != 7]
    assert sorted(learned) == sorted(expected)
    totals = json.loads(done.stdout)
    assert totals["lost_tokens"] > 400
    assert 0.3 < totals["sources"]["talks"]["learned"] < 0.4
