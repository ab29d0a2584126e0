"""A whole run over chats: from messages.jsonl and a model's files to masked labels, the same after kill -9."""

from __future__ import annotations

import io
import json
from pathlib import Path

import chat_templates
import model_files
import numpy as np
import pyarrow as pa
import pytest
from committed import committed
from lakes import stepfs
from PIL import Image
from planned_lake import produce
from pyarrow import parquet
from safetensors.numpy import load
from tokenizers import Tokenizer

from spans_audit import Piece, pieces_of

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
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "own.jinja").write_text(chat_templates.without_blocks("chatml"))
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
    path.write_text(
        PLAN.replace("file: tokenizer.json", "file: tokenizer.json, chat_template: own.jinja, eos: <|im_end|>")
    )
    return path


def test_each_answer_is_learned_and_nothing_else(plan: Path, tmp_path: Path) -> None:
    checked = produce("check", plan)
    assert checked.returncode == 0, checked.stderr
    assert "≈ 32.3%" in next(line for line in checked.stdout.splitlines() if line.startswith("talks "))
    assert "\nanswers    talks: end with <|im_end|>, which is learned\n" in checked.stdout
    long = "source talks: 1 of 40 records looked at are longer than a row of 128 tokens, and dropped"
    assert f"note: {long}; long: split or truncate cuts them between turns" in checked.stdout
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
    assert totals["sources"]["talks"]["dropped"] == 1
    assert 0.3 < totals["sources"]["talks"]["learned"] < 0.4
    shown = produce("lineage", lake, "--step", 0, "--text", "--plan-dir", tmp_path, "--json")
    assert {one["problem"] for one in json.loads(shown.stdout)["spans"]} == {None}, "also from another directory"


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_check_says_where_records_have_tools_that_the_plan_does_not_name(
    plan: Path, tmp_path: Path, deep: list[str]
) -> None:
    """trl takes a field `tools` by itself."""
    note = "source talks: its records have tools, which templates do not get; chat: {tools: tools} names their field"
    assert note not in produce("check", plan, *deep).stdout
    lines = (tmp_path / "messages.jsonl").read_text()
    (tmp_path / "messages.jsonl").write_text(lines.replace("}]}\n", '}], "tools": []}\n'))
    assert note not in produce("check", plan, *deep).stdout
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    (tmp_path / "messages.jsonl").write_text(lines.replace("}]}\n", f'}}], "tools": {tools}}}\n'))
    assert note in produce("check", plan, *deep).stdout
    plan.write_text(plan.read_text().replace("chat: messages", "chat: {tools: tools}"))
    assert note not in produce("check", plan, *deep).stdout


def test_documents_that_fim_leaves_are_counted_wherever_a_run_stops(plan: Path, tmp_path: Path) -> None:
    """Known by the tokens of their parts that are in no document of the lake."""
    model, row, lengths = Tokenizer.from_str(model_files.gpt2()), 64, [7 * number for number in range(1, 20)]
    model.add_special_tokens(["<pre>", "<mid>", "<suf>"])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    source = "format: jsonl, files: code.jsonl, epochs: 1, fim: {tokens: [<pre>, <mid>, <suf>], rate: 1}"
    plan.write_text(
        PLAN.replace("format: jsonl, files: messages.jsonl, chat: messages, epochs: 1", source).replace("128", str(row))
    )
    plain = sum(length + 3 > row for length in lengths)
    note = f"{plain} of {len(lengths)} documents looked at are longer than a row, and stay as they are, without fim"
    assert note in produce("check", plan).stdout
    assert json.loads(produce("check", plan, "--json").stdout)["sources"]["talks"]["plain"] == plain
    lake, counted = f"file://{tmp_path}/lake", 0
    for limit in (2, 1, 100):
        done = produce("run", plan, lake, "--limit-steps", limit, "--json")
        assert done.returncode == 0, done.stderr
        counted += json.loads(done.stdout)["sources"]["talks"]["plain"]
    assert f"{plain} longer than a row left without fim" in produce("run", plan, f"{lake}-whole").stdout
    ids = np.concatenate([load(file)["input_ids"].ravel() for _, files in committed(lake) for file in files])
    assert counted == plain == len(lengths) - int((ids == model.token_to_id("<pre>")).sum())
    shown = stepfs("status", lake, "--json")
    assert [one["plan"]["sources"]["talks"]["plain"] for one in json.loads(shown.stdout)["producers"].values()] == [
        plain
    ]


PAIRS = 1500  # 29 × 31 pairs of lengths, each at least once


def test_pairs_stay_together_and_a_text_is_found_again(tmp_path: Path) -> None:
    lines = [
        json.dumps({"prompt": f"{number}?", "chosen": "yes" * (number % 29 + 1), "rejected": "no" * (number % 31 + 1)})
        for number in range(PAIRS)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "plan.yaml").write_text("""\
version: 1
output: {mesh: "dp=4", sequence_length: 120, micro_batch_tokens: 240, micro_batches: 2}
sources: {pairs: {format: jsonl, files: pairs.jsonl, pair: {}, epochs: 1, shuffle: none}}
until: {exhausted: all, last: pad}
""")
    lake = f"file://{tmp_path}/lake"
    done = produce("run", tmp_path / "plan.yaml", lake, "--workers", 2, "--json")
    assert done.returncode == 0, done.stderr
    whole = {
        (len(one["prompt"] + one["chosen"]) + 1, len(one["prompt"] + one["rejected"]) + 1)
        for one in map(json.loads, lines)
    }
    found: set[int] = set()
    for _, files in committed(lake):
        for file in map(load, files):
            chosen, rejected = file["spans"][::2], file["spans"][1::2]
            assert (chosen[:, 8] == 1).all()
            assert (rejected[:, 8] == 2).all()
            assert (chosen[:, 0] == rejected[:, 0]).all(), "one micro-batch"
            assert (chosen[:, 6] == rejected[:, 6]).all(), "one record"
            assert set(zip(chosen[:, 2].tolist(), rejected[:, 2].tolist(), strict=True)) <= whole
            found |= set(chosen[:, 6].tolist())
            assert (rejected[:, 7] == chosen[:, 2]).all()
    sizes = [len(one["prompt"] * 2 + one["chosen"] + one["rejected"]) + 2 for one in map(json.loads, lines)]
    lost = [size for size in sizes if size > 120]
    assert len(found) == PAIRS - len(lost)
    assert json.loads(done.stdout)["lost_tokens"] == sum(lost)
    again = produce("replay", lake, "--steps", "0:3", "--plan-dir", tmp_path, "--workers", 1)
    assert again.returncode == 0, again.stderr
    shown = produce("lineage", lake, "--step", 0, "--rank", 1, "--text", "--plan-dir", tmp_path, "--json")
    assert {one["problem"] for one in json.loads(shown.stdout)["spans"]} == {None}


def test_an_answer_by_itself_keeps_its_label(tmp_path: Path) -> None:
    records = [
        {"asked": f"{number}?", "said": "yes" * (number % 29 + 1), "good": number % 3 == 0} for number in range(300)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (tmp_path / "plan.yaml").write_text("""\
version: 1
output: {mesh: "dp=2,tp=2", sequence_length: 80, micro_batches: 2, ext: .tar}
pack: {align: mesh}
sources:
  answers: {format: jsonl, files: answers.jsonl, pair: {label: good, completion: said, prompt: asked}, epochs: 1}
until: {exhausted: all, last: pad}
""")
    lake = f"file://{tmp_path}/lake"
    done = produce("run", tmp_path / "plan.yaml", lake, "--json")
    assert done.returncode == 0, done.stderr
    made = [bytes(piece.ids[:-1]).decode() for piece in pieces(lake)]
    texts = {one["asked"] + one["said"]: 1 if one["good"] else 2 for one in records}
    fit = {text for text in texts if len(text) < 80}
    assert sorted(made) == sorted(fit)
    assert all(piece.side == texts[text] for piece, text in zip(pieces(lake), made, strict=True))
    assert json.loads(done.stdout)["sources"]["answers"]["dropped"] == len(texts) - len(fit) > 0
    shown = produce("lineage", lake, "--step", 0, "--text", "--plan-dir", tmp_path, "--json")
    spans = json.loads(shown.stdout)["spans"]
    assert {one["problem"] for one in spans} == {None}
    where = ("--source", "answers", "--file", spans[0]["file"], "--record", spans[0]["record"], "--plan-dir", tmp_path)
    assert [one["step"] for one in json.loads(produce("find", lake, *where, "--json").stdout)["found"]] == [0]
    again = produce("replay", lake, "--steps", "0:3", "--plan-dir", tmp_path, "--workers", 1)
    assert again.returncode == 0, again.stderr


def pieces(lake: str) -> list[Piece]:
    return [piece for _, files in committed(lake) for file in files for piece in pieces_of(".tar", file)]


@pytest.mark.nightly
def test_images_of_chats_go_with_their_documents(tmp_path: Path) -> None:
    """A row of Parquet as datasets stores it: parts of messages, and a list of {bytes, path}."""
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens([*chat_templates.CONTROLS, "<|image_pad|>"])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
        "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    )

    def png(number: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (28 * (1 + number % 3), 28), (number, 0, 0)).save(file, "PNG")
        return file.getvalue()

    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}] * (number % 4) + [{"type": "text", "text": "?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "!"}]},
            ],
            "images": [{"bytes": png(number), "path": None}] * (number % 4),
        }
        for number in range(60)
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "plan.yaml").write_text("""\
version: 1
output:
  mesh: "dp=2"
  sequence_length: 64
  columns: {pixels: {dtype: uint8, shape: [588], file: own}, grid: {dtype: int32, shape: [3]}}
tokenizer: {kind: huggingface, file: tokenizer.json, eos: <|im_end|>}
sources: {shown: {format: parquet, files: a.parquet, chat: messages, images: images, epochs: 1}}
until: {exhausted: all, last: pad}
""")
    checked = produce("check", tmp_path / "plan.yaml")
    assert checked.returncode == 0, checked.stderr
    lake, token = f"file://{tmp_path}/lake", model.token_to_id("<|image_pad|>")
    done = produce("run", tmp_path / "plan.yaml", lake, "--workers", 2)
    assert done.returncode == 0, done.stderr
    found = []
    for _, files in committed(lake):
        for file, beside in zip(files[::2], files[1::2], strict=True):
            arrays, pixels, at = load(file), load(beside)["pixels"], 0
            for span, count in zip(arrays["spans"].tolist(), arrays["pixels_counts"].tolist(), strict=True):
                ids = arrays["input_ids"][span[0]][span[1] : span[1] + span[2]]
                assert count == 4 * (ids == token).sum()
                assert (pixels[at : at + count].reshape(-1, 3) == (span[6], 0, 0)).all(), "of that row"
                assert count == 4 * (1 + span[6] % 3) * (span[6] % 4)
                at += count
                found.append(span[6])
            assert at == len(pixels)
    assert sorted(found) == list(range(60))
    shown = produce("lineage", lake, "--step", 0, "--text", "--plan-dir", tmp_path, "--json")
    assert {one["problem"] for one in json.loads(shown.stdout)["spans"]} == {None}


@pytest.mark.parametrize("long", ["truncate", "split"])
def test_long_chats_are_cut_between_turns_wherever_a_run_stops(long: str, plan: Path, tmp_path: Path) -> None:
    word = "chat: messages, epochs: 1"
    plan.write_text(plan.read_text().replace(word, f"{word}, long: {long}").replace("128", "64"))
    lakes = []
    for name, stops in (("whole", [1000]), ("stopped", [1, 2, 5, 7, 1000])):
        lakes.append(f"file://{tmp_path}/{name}")
        for steps in stops:
            done = produce("run", plan, lakes[-1], "--limit-steps", steps, "--workers", 1, "--json")
            assert done.returncode == 0, done.stderr
    whole, stopped = map(committed, lakes)
    assert whole == stopped
    model = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [
        model.decode(file["input_ids"][micro][file["doc_ids"][micro] == document].tolist(), skip_special_tokens=False)
        for _, files in whole
        for file in map(load, files)
        for micro in range(len(file["doc_ids"]))
        for document in range(file["doc_ids"][micro].max() + 1)
    ]
    assert all(text.startswith("<|im_start|>user") and text.endswith("<|im_end|>\n") for text in texts)
    assert sum("answer" in text for text in texts) == 40
    assert sum("and?" in text for text in texts) == (39 if long == "split" else sum("xxx" in text for text in texts))
    replayed = produce("replay", lakes[0], "--steps", "0:3", "--plan-dir", tmp_path, "--workers", 1)
    assert replayed.returncode == 0, replayed.stderr


def test_other_stages_are_accepted_and_a_begun_chat_is_not_cut_twice(plan: Path, tmp_path: Path) -> None:
    """`long` and stages are policy: what is left of a record whose documents are others now is left out, and named."""
    split = (
        plan.read_text()
        .replace("chat: messages", "chat: messages, long: split")
        .replace("128", "64")
        .replace("dp=2", "dp=1")
    )
    later = "output: {mesh: dp=1, labels: same, micro_batch_tokens: 192}\nstages: [{sequence_length: 64}, {from: 6, sequence_length: 48}]\n"
    model, said = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), ""
    for begun in (2, 3):  # between two records, and within one
        plan.write_text(split)
        lake = f"file://{tmp_path}/{begun}"
        assert produce("run", plan, lake, "--limit-steps", begun, "--workers", 1).returncode == 0
        plan.write_text("\n".join(later if line.startswith("output") else line for line in split.splitlines()))
        assert produce("check", plan, lake).returncode == 4
        done = produce("run", plan, lake, "--accept-changes", "--workers", 1)
        assert done.returncode == 0, done.stderr
        said += done.stderr
        texts = [
            model.decode(file["input_ids"][micro][start : start + tokens].tolist(), skip_special_tokens=False)
            for _, files in committed(lake)
            for file in map(load, files)
            for micro, start, tokens, *_ in file["spans"].tolist()
        ]
        assert all(text.startswith("<|im_start|>user") and text.endswith("<|im_end|>\n") for text in texts)
        answers = [text for text in texts if "answer" in text]
        assert len(answers) == len(set(answers)) >= 39
    assert "source talks: the rest of the record that was begun is left out: it is cut otherwise now" in said


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"chat: messages": "chat: {learn: all}"}, 0, "every token of the chats looked at is learned, the user's too"),
        (
            {"chat_template: own.jinja": "chat_template: '{% for m in messages %}<|user|>{{ m.content }}{% endfor %}'"},
            0,
            "an answer ends with <|user|>, which is not learned, so a model learns no end of it; add stop: ['<|user|>'] to its chat",
        ),
        (
            {"chat: messages": "chat: {stop: [<|usr|>]}"},
            2,
            "the stop token '<|usr|>' is not in its vocabulary; did you mean '<|user|>'?",
        ),
        ({"chat: messages": "pair: {}"}, 4, "none of the 40 records looked at can be decoded (no answer or prompt"),
        (
            {"chat: messages": "chat: {roles: {assistant: user}}"},
            4,
            "(no learned token; the roles are user, user, user, user, and learn is assistant)",
        ),
        (
            {"chat: messages": "fim: {tokens: [a, <fim>, b]}"},
            2,
            "the fim middle token '<fim>' is not in its vocabulary",
        ),
    ],
)
def test_check_says_what_a_run_would_learn_nothing_or_all_of(
    changes: dict[str, str], code: int, words: str, plan: Path
) -> None:
    for old, new in changes.items():
        plan.write_text(plan.read_text().replace(old, new))
    done = produce("check", plan)
    assert done.code == code, done.err
    assert words in done.out + done.err
    if code:
        ran = produce("run", plan, f"file://{plan.parent}/lake", "--workers", 1)
        assert ran.code != 0
        assert words.rsplit("(", maxsplit=1)[-1].strip(")") in ran.err
