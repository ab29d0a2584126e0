"""`stepfs-produce view`: what is learned of each document, of plans, lakes and files; nothing of a record is executed."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import chat_templates
import json_schemas
import model_files
import numpy as np
import pytest
from committed import committed
from lakes import Ended
from payload_samples import npy, safetensors
from planned_lake import lake_of, made, one_line, produce, write_plan
from rich.console import Console
from safetensors.numpy import load, save
from tokenizers import AddedToken, Tokenizer

HOSTILE = "no\x1b]0;title\x07 \u202e<script>alert(1)</script> ⟨eos⟩ [[so]]"
FIM = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
NO_END_LEARNED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
PLAN = """\
version: 1
output: {mesh: "dp=2", sequence_length: 128, micro_batches: 2OUTPUT}
tokenizer: {kind: huggingface, file: tokenizer.json, chat_template: own.jinja, eos: <|im_end|>}
sources:
  all: {format: jsonl, files: talks.jsonl, chat: {messages: messages, learn: all}}
  code: {format: jsonl, files: code.jsonl, fim: {tokens: [<fim_prefix>, <fim_middle>, <fim_suffix>], rate: 1, spm: SPM}}
  pairs: {format: jsonl, files: pairs.jsonl, pair: {}}
  talks: {format: jsonl, files: talks.jsonl, chat: messages}
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats with and without a wrong mask, pairs, and code whose middle comes last."""
    directory = tmp_path_factory.mktemp("mixed")
    model = Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens([*chat_templates.CONTROLS, *map(AddedToken, FIM)])
    model.save(str(directory / "tokenizer.json"))
    (directory / "own.jinja").write_text(chat_templates.without_blocks("chatml"))
    talk = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    records = {
        "talks": {"messages": talk},
        "pairs": {"prompt": "Say: ", "chosen": "yes", "rejected": HOSTILE},
        "code": {"text": "def f(a):\n\treturn a\n"},
    }
    for name, record in records.items():
        (directory / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 40)
    return directory


def viewed(
    directory: Path, *arguments: object, output: str = "", spm: str = "0", env: dict[str, str] | None = None
) -> Ended:
    (directory / "plan.yaml").write_text(PLAN.replace("OUTPUT", output).replace("SPM", spm))
    return produce("view", directory / "plan.yaml", *arguments, env=env)


def test_of_a_plan_each_source_is_shown_with_what_is_learned_of_it(mixed: Path) -> None:
    own = (mixed / "own.jinja").read_text()
    ended = viewed(mixed, "--samples", 1)
    assert ended.code == 0, ended.err
    assert "⟨<|im_start|>⟩assistant↵\n  [[It is 2.⟨<|im_end|>⟩↵]]\n" in ended.out
    assert "\n  ⟨<|im_start|>⟩[[user↵\n  1 + 1?⟨<|im_end|>⟩↵\n" in ended.out
    prefix, rest = ended.out.split("⟨<fim_prefix>⟩[[")[1].split("⟨<fim_suffix>⟩")
    suffix, middle = rest.split("⟨<|im_end|>⟩")[0].split("⟨<fim_middle>⟩")
    text = "def f(a):↵\n  \\treturn a↵\n"
    assert [re.sub(r"\s+", " ", one) for one in (prefix + middle + suffix,)] == [re.sub(r"\s+", " ", text)]
    assert ended.out.index("pairs CHOSEN") < ended.out.index("pairs REJECTED")
    assert "  Say: [[yes⟨<|im_end|>⟩]]" in ended.out
    assert [line for line in ended.out.splitlines() if line.startswith("note")] == [
        "note: source all: all is learned, the user's words too"
    ]
    (mixed / "own.jinja").write_text(NO_END_LEARNED)
    told = viewed(mixed, "--source", "talks").out
    (mixed / "own.jinja").write_text(own)
    assert "note: source talks: <|im_end|> behind an answer is not learned, so a model learns no end of it\n" in told
    other = viewed(mixed, "--samples", 1, "--source", "code", spm="1").out
    assert "⟨<fim_prefix>⟩[[⟨<fim_suffix>⟩" in other
    assert "⟨prefix and middle: <fim_middle>⟩" in other
    assert "talks" not in other


def test_what_a_record_has_is_shown_and_never_executed(mixed: Path) -> None:
    shown = r"no\x1b]0;title\x07 \u202e<script>alert(1)</script> \u27e8eos\u27e9 [\[so]\]"
    for arguments in ([], ["--ids"], ["--full"], ["--json"]):
        ended = viewed(mixed, "--source", "pairs", *arguments)
        assert not {"\x1b", "\x07", "\u202e"} & set(ended.out)
        if arguments == ["--json"]:
            texts = [
                part["text"] for row in ended.document["rows"] for one in row["documents"] for part in one["parts"]
            ]
            assert HOSTILE in texts
        else:
            assert shown in ended.out


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)],
    ids=["colours", "dumb", "no colour"],
)
def test_a_terminal_has_colours_unless_it_wants_none(mixed: Path, variables, coloured, monkeypatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: True))
    out = viewed(mixed, "--samples", 1, "--source", "talks", env={"COLUMNS": "40", **variables}).out
    assert ("\x1b[1;32mIt is 2.\x1b[0m" in out, "[[It is 2." in out) == (coloured, not coloured)
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", out).splitlines())) <= (80 if variables["TERM"] == "dumb" else 41)


def same_as_the_file(rows: list[dict], file: dict[str, np.ndarray]) -> None:
    """Ids, padding and what is learned, against the arrays of a full file, that a trainer reads."""
    for micro, (ids, labels, documents) in enumerate(
        zip(*(file[one] for one in ("input_ids", "labels", "doc_ids")), strict=True)
    ):
        found = [one for row in rows if row["micro"] == micro for one in row["documents"]]
        parts = [[part for part in one["parts"] if part["kind"] != "cut"] for one in found]
        assert [[number for part in each for number in part["ids"]] for each in parts] == [
            ids[documents == number].tolist() for number in range(len(found))
        ]
        for number, each in enumerate(parts):
            flags = [part["learned"] for part in each for _ in part["ids"]]
            assert flags == [False, *(labels[documents == number][:-1] != -100).tolist()]
        cuts = [part["ids"] for one in found for part in one["parts"] if part["kind"] == "cut"]
        ends = [labels[documents == number][-1:].tolist() for number in range(len(found))]
        assert cuts == [end for end in ends if end != [-100]]
        assert sum(row["padding"] for row in rows if row["micro"] == micro) == (documents < 0).sum()


def test_every_kind_of_file_shows_the_same_documents(mixed: Path, tmp_path: Path) -> None:
    tables, whole, model = [], {}, Tokenizer.from_file(str(mixed / "tokenizer.json"))
    kinds = ["", ", arrays: compact", ", ext: .pt, files: micro_batches", ", ext: .tar", ", labels: same"]
    for number, output in enumerate(kinds):
        viewed(mixed, "--samples", 1, output=output)
        lake = f"file://{tmp_path}/{number}"
        assert produce("run", mixed / "plan.yaml", lake, "--limit-steps", 1, "--workers", 1).code == 0
        document = produce("view", lake, "--rank", 1, "--plan-dir", mixed, "--json").document
        json_schemas.check("produce-view", document)
        tables.append([one for row in document["rows"] for one in row["documents"]])
        for one in tables[-1]:
            parts = [part for part in one["parts"] if part["kind"] != "cut"]
            shown = "".join(part["text"] * (len(part["ids"]) if part["kind"] == "token" else 1) for part in parts)
            assert shown == model.decode([each for part in parts for each in part["ids"]], skip_special_tokens=False)
        if not whole:
            [(_, files)] = committed(lake)
            whole = load(files[1])
            same_as_the_file(document["rows"], whole)
            part = produce("view", lake, "--rank", 1, "--micro", 1, "--plan-dir", mixed, "--json").document
            assert part["rows"] == [row for row in document["rows"] if row["micro"] == 1]
    strip = [[{**one, "start": 0, "parts": [part["ids"] for part in one["parts"]]} for one in each] for each in tables]
    assert tables[0] == tables[1] == tables[2] == tables[3]
    assert (
        [one["side"] for one in tables[0]].count("chosen") == [one["side"] for one in tables[0]].count("rejected") > 0
    )
    assert len(strip[4]) == len(strip[0])
    assert sum(one["learned"] for one in tables[4]) > sum(one["learned"] for one in tables[0]), "the first tokens too"


def test_files_of_fewer_arrays_say_what_they_lack(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ".npy")
    made(tmp_path, steps=1)
    rows = produce("view", lake_of(tmp_path), "--rank", 1, "--json").document["rows"]
    assert {one["source"] for row in rows for one in row["documents"]} == {None}
    assert {part["learned"] for row in rows for one in row["documents"] for part in one["parts"]} == {True, False}
    lake = f"file://{tmp_path}/bin"
    assert (
        produce(
            "text",
            lake,
            "-i",
            tmp_path / "prose.txt",
            "--slices",
            1,
            "--ext",
            ".bin",
            "--seq-len",
            64,
            "--limit-steps",
            1,
        ).code
        == 0
    )
    shown = produce("view", lake, "--step", 0).out
    assert "and no labels in such files" in shown
    assert "  prose 0 ↵\n  prose 1 " in shown
    assert "[[prose" not in shown
    plan.write_text(plan.read_text().replace(".npy", ".safetensors"))
    assert produce("run", plan, f"file://{tmp_path}/cut", "--limit-steps", 1, "--workers", 1).code == 0
    assert "⟨cut; next: y⟩]]" in produce("view", f"file://{tmp_path}/cut").out


def test_documents_are_rounded_up_and_a_long_text_is_shortened(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("128", "1024").replace("256", "1024") + "pack: {align: 16}\n")
    (tmp_path / "prose.txt").write_text("z" * 900 + "\n" + "z" * 20 + "\n")
    short, full = (produce("view", plan, "--source", "prose", *more).out for more in ([], ["--full"]))
    assert "⟨… 499 characters …⟩" in short
    assert "z" * 899 in full
    assert "⟨padding × 11⟩" in full


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["LAKE", "--step", 99], 3, "step 99 is not in the lake (steps 0 to 11 are)"),
        (["LAKE", "--rank", 2], 2, "--rank 2: the lake has 2 data ranks, from 0 on"),
        (["LAKE", "--micro", 2], 2, "--micro 2: there are 2, from 0 on"),
        (["LAKE", "--source", "cod"], 3, "no document of source 'cod' is here; there are: code, prose"),
        (["LAKE", "--samples", 2], 2, "--samples is for plans"),
        (["HERE/plan.yaml", "--step", 2], 2, "--step is for lakes"),
        (["HERE/plan.yaml", "--source", "cod"], 2, "did you mean 'code'?"),
        (["HERE/no.yaml"], 3, "no such file; name the YAML file of a plan"),
        (["HERE"], 2, "is no step or file of a mount"),
        (["HERE/odd.yaml"], 2, "odd.yaml:2:10: output: unknown key 'ext_'"),
        (["HERE/gone.yaml"], 3, "gone.yaml:5:48: sources.prose.files: "),
        (["HERE/mine.npy"], 2, "no plan made this file; `stepfs show` shows its arrays"),
        (["HERE/mine.safetensors"], 2, "no plan made this file; `stepfs show` shows its arrays"),
        (["HERE/torn.safetensors"], 5, "torn.safetensors: "),
        (["HERE/fifo.npy"], 2, "fifo.npy: is not a regular file"),
    ],
)
def test_what_cannot_be_shown_is_one_line(here: Path, arguments: list[object], code: int, words: str) -> None:
    plan = (here / "plan.yaml").read_text()
    (here / "odd.yaml").write_text(plan.replace("ext:", "ext_:"))
    (here / "gone.yaml").write_text(plan.replace("prose.txt", "gone.txt"))
    (here / "mine.npy").write_bytes(npy(np.zeros(3)))
    (here / "mine.safetensors").write_bytes(safetensors(a=np.zeros(3, np.int64)))
    (here / "torn.safetensors").write_bytes(b"\x09" + bytes(20))
    os.mkfifo(here / "fifo.npy")
    given = [str(one).replace("LAKE", lake_of(here)).replace("HERE", str(here)) for one in arguments]
    one_line(produce("view", *given), code, words)


def test_a_file_that_lies_about_itself_is_one_line(mixed: Path, tmp_path: Path) -> None:
    viewed(mixed, "--samples", 1)
    lake = f"file://{tmp_path}/lake"
    assert produce("run", mixed / "plan.yaml", lake, "--limit-steps", 1, "--workers", 1).code == 0
    [(_, (payload, _))] = committed(lake)
    true, odd = load(payload), tmp_path / "odd.safetensors"
    said = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])["__metadata__"]
    for wrong in (
        {"doc_ids": true["doc_ids"] + 900},
        {"labels": true["labels"][:, :9]},
        {"spans": true["spans"][:, :3]},
        {"doc_ids": None},
    ):
        batch = {name: value for name, value in (true | wrong).items() if value is not None}
        odd.write_bytes(save(batch, said))
        ended = produce("view", odd)
        assert (ended.code in {2, 5}, ended.err.count("\n")) == (True, 1), ended.err
    odd.write_bytes(save(true | {"input_ids": true["input_ids"] * 0 - 7, "labels": true["labels"] + 2**40}, said))
    assert produce("view", odd, "--json").code == 0


@pytest.mark.parametrize(("samples", "shown"), [(1, 1), (3, 3)])
def test_answers_with_labels_of_their_own_are_samples_each(tmp_path: Path, samples: int, shown: int) -> None:
    lines = [{"prompt": f"{n}?", "completion": f"answer {n}", "label": n % 2 == 0} for n in range(9)]
    (tmp_path / "kto.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = "{format: jsonl, files: kto.jsonl, pair: {label: label}, epochs: 1}"
    (tmp_path / "plan.yaml").write_text(f"output: {{mesh: dp=1, sequence_length: 64}}\nsources: {{kto: {source}}}\n")
    rows = produce("view", tmp_path / "plan.yaml", "--samples", samples, "--json").document["rows"]
    documents = [one for row in rows for one in row["documents"]]
    assert len(documents) == shown
    for one in documents:
        answer = "".join(part["text"] for part in one["parts"] if part["learned"] and part["kind"] == "text")
        assert one["side"] == ("chosen" if int(answer.split()[1]) % 2 == 0 else "rejected")


def test_without_the_same_tokenizer_ids_are_shown_and_the_way_to_it(mixed: Path, tmp_path: Path) -> None:
    viewed(mixed, "--samples", 1)
    lake, elsewhere = f"file://{tmp_path}/lake", tmp_path / "elsewhere"
    assert produce("run", mixed / "plan.yaml", lake, "--limit-steps", 1, "--workers", 1).code == 0
    elsewhere.mkdir()
    for why in (
        "tokenizer.json is not here; --plan-dir names",
        "tokenizer.json is another tokenizer than the one that",
    ):
        ended = produce("view", lake, "--plan-dir", elsewhere)
        assert (ended.code, why in ended.out.splitlines()[1]) == (0, True), ended.out
        assert re.search(r"\[\[\d+ \d+", ended.out)
        assert "It is" not in ended.out
        shutil.copy(mixed / "tokenizer.json", elsewhere)
        model = Tokenizer.from_file(str(elsewhere / "tokenizer.json"))
        model.add_tokens(["another"])
        model.save(str(elsewhere / "tokenizer.json"))


def test_lineage_with_texts_names_the_view(here: Path) -> None:
    shown = produce("lineage", lake_of(here), "--step", 3, "--rank", 1, "--text", "--plan-dir", here).out
    words = shown.splitlines()[-1].partition("stepfs-produce ")[2].split()
    assert produce(*words).out.startswith("step 3 by plan\n")
