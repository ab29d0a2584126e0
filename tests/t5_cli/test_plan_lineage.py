"""`stepfs-produce lineage` of a small planned lake: its places, its words for what is missing, every kind of payload."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import json_schemas
import pytest
from lakes import Ended, stepfs
from planned_lake import (
    ONE_PLAN_STEPS,
    behind_the_head,
    lake_of,
    made,
    one_line,
    produce,
    replayed,
    spans,
    texts,
    write_plan,
)
from planted import change_the_last_byte, flip_a_token, move_a_span, put_planted
from tokenizers import Tokenizer, models, pre_tokenizers

from stepfs_producer import Producer
from stepfs_producer.run import session


def test_the_document_is_the_one_of_the_page_and_the_lines_say_the_same(here: Path) -> None:
    document = produce("lineage", lake_of(here), "--step", 3, "--json").document
    json_schemas.check("produce-lineage", document)
    assert sum(one["share"] for one in document["sources"].values()) == pytest.approx(1)
    assert document["tokens"] == sum(one["tokens"] for one in document["spans"])
    assert {(one["rank"], one["micro"]) for one in document["spans"]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    shown = produce("lineage", lake_of(here), "--step", 3)
    assert document["plan"] in shown.out
    assert all(f"0/{name}" in shown.out for name in ("prose.txt", "0.jsonl"))
    text = produce("lineage", lake_of(here), "--step", 3, "--rank", "1:0", "--text", "--plan-dir", here)
    assert "    prose " in text.out
    assert "no text" not in text.out


def test_a_token_has_the_span_around_it(here: Path) -> None:
    whole = spans(here, "--step", 2, "--rank", "1")
    assert {one["rank"] for one in whole} == {1}
    for span in whole:
        place = f"1:{span['micro']}:{span['start'] + span['tokens'] - 1}"
        assert spans(here, "--step", 2, "--rank", place) == [span]
    ends = {one["start"] + one["tokens"] for one in whole if one["micro"] == 0}
    padding = next(
        end for end in sorted(ends) if end not in {one["start"] for one in whole if one["micro"] == 0} | {256}
    )
    one_line(produce("lineage", lake_of(here), "--step", 2, "--rank", f"1:0:{padding}"), 3, "is padding")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--rank", "1:0:256"], 2, "token 256: a micro-batch has 256, from 0 on"),
        (["--rank", "1:2"], 2, "micro-batch 2: the file has 2, from 0 on"),
        (["--rank", "2"], 2, "--rank 2: the lake has 2 data ranks, from 0 on"),
        (["--rank", "one"], 2, "--rank 'one': write a rank"),
        (["--step", "99"], 3, "step 99 is not in the lake (steps 0 to 11 are)"),
    ],
)
def test_what_is_beyond_is_said_to_be(here: Path, arguments, code, words) -> None:
    one_line(produce("lineage", lake_of(here), *arguments), code, words)


def test_a_reclaimed_step_has_no_lineage(here: Path) -> None:
    url = lake_of(here)
    record = spans(here, "--step", 0)[0]
    assert stepfs("checkpoint", url, "--group", "run", "--new-group", 6).code == 0
    assert stepfs("reclaim", url, "--grace", "0s").code == 0
    one_line(produce("lineage", url, "--step", 2), 3, "step 2 is not in the lake (steps 6 to 11 are)")
    words = [
        "--source", record["source"], "--file", record["file"], "--record", record["record"], "--plan-dir", here,
    ]  # fmt: skip
    one_line(produce("find", url, *words), 3, "no step from 6 on holds it; those before were reclaimed")
    one_line(replayed(here, steps="2:8"), 3, "step 2 is not in the lake")
    refused = replayed(here, steps="6:12")
    assert (refused.code, "the position before it is not left" in refused.err) == (3, True), refused.err
    first = int(refused.err.split("the first that can is ")[1])
    assert replayed(here, steps=f"{first}:12").code == 0


@pytest.mark.parametrize("ext", [".npy", ".bin"])
def test_a_lake_without_spans_says_so(tmp_path: Path, ext: str) -> None:
    plan, url = write_plan(tmp_path, ext.replace(".bin", ".npy")), lake_of(tmp_path)
    plan.write_text(plan.read_text() + "defaults: {shuffle: none}\n")
    if ext == ".npy":
        made(tmp_path, steps=1)
    else:
        options = ["--slices", 1, "--ext", ext, "--seq-len", 64, "--limit-steps", 4]
        assert produce("text", url, "-i", tmp_path / "prose.txt", *options).code == 0
        assert produce("replay", url, "--steps", "0:2", "--workers", 1).code == 0, "its plan is read again"
    one_line(produce("lineage", url), 2, "lineage is in the .safetensors, .pt and .tar files")
    words = [
        "--source",
        "prose" if ext == ".npy" else "text",
        "--file",
        "prose.txt",
        "--record",
        0,
        "--plan-dir",
        tmp_path,
    ]
    one_line(produce("find", url, *words), 2, "which has no room for spans")


@pytest.mark.parametrize("ext", [".pt", ".tar"])
def test_other_formats_with_spans_have_lineage(tmp_path: Path, ext: str, original: Path) -> None:
    made(tmp_path, ext=ext, steps=1)
    assert spans(tmp_path, "--step", 0) == spans(original, "--step", 0)
    shown = produce("lineage", lake_of(tmp_path), "--text", "--plan-dir", tmp_path, "--json").document
    assert all(one["text"] for one in shown["spans"])


def test_files_of_micro_batches_have_the_same_past(tmp_path: Path, original: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("micro_batches: 2", "micro_batches: 2, files: micro_batches"))
    made(tmp_path, steps=3)
    here, whole = spans(tmp_path, "--step", 2), spans(original, "--step", 2)
    assert [{**one, "slice": 0} for one in here] == [{**one, "slice": 0} for one in whole]
    assert {one["slice"] for one in here} == {0, 1, 2, 3}
    assert spans(tmp_path, "--step", 2, "--rank", "1:1") == [one for one in here if one["slice"] == 3]
    one_line(produce("lineage", lake_of(tmp_path), "--rank", "1:2"), 2, "micro-batch 2: a rank has 2, from 0 on")
    last = here[-1]
    words = [
        "--source", last["source"], "--file", last["file"], "--record", last["record"], "--plan-dir", tmp_path,
    ]  # fmt: skip
    found = produce("find", lake_of(tmp_path), *words, "--json").document["found"]
    assert (2, 1, last["micro"], last["start"]) in {
        (one["step"], one["rank"], one["micro"], one["start"]) for one in found
    }
    assert replayed(tmp_path, "--ranks", 1, steps="0:3").code == 0
    assert replayed(tmp_path, "--to", tmp_path / "out", "--ranks", 1, steps="1:2").code == 0
    written = [path.name for path in sorted((tmp_path / "out/step-000000001").iterdir())]
    assert written == [f"rank-00001.micro-{micro:04}.safetensors" for micro in range(2)]


def test_a_producer_of_ones_own_has_no_lineage(tmp_path: Path, file_url: str) -> None:
    assert stepfs("init", file_url, "--slices", 1, "--ext", ".bin").code == 0
    with Producer(file_url, producer_id="mine") as producer:
        producer.append([b"bytes"], position=1)
    one_line(produce("lineage", file_url), 2, "has no room for spans")
    one_line(
        produce("find", file_url, "--source", "a", "--file", "b", "--record", 0),
        3,
        "the lake has no source 'a'",
    )
    one_line(produce("replay", file_url, "--steps", "0:1"), 4, "a plan did not make them")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.write_bytes(behind_the_head(path)), "other tokens come of 0/prose.txt"),
        *(
            pytest.param(change, why, marks=pytest.mark.nightly)
            for change, why in (
                (lambda path: path.unlink(), "no such file"),
                (lambda path: path.write_text(path.read_text()[:-9]), "is shorter than when this plan began"),
                (lambda path: path.write_text("PROSE" + path.read_text()[5:]), "begins otherwise"),
            )
        ),
    ],
    ids=["unnoticed", "gone", "shorter", "beginning"],
)
def test_another_text_is_never_shown(here: Path, change, why: str) -> None:
    shown = [one for step in range(ONE_PLAN_STEPS) for one in texts(here, step) if one["source"] == "prose"]
    assert all(one["text"] for one in shown)
    change(here / "prose.txt")
    after = [one for step in range(ONE_PLAN_STEPS) for one in texts(here, step)]
    place = next(one for one in spans(here, "--step", 0) if one["source"] == "prose")
    rank = f"{place['rank']}:{place['micro']}:{place['start']}"
    words = ["--step", 0, "--rank", rank, "--text", "--plan-dir", here]
    shown_alone = produce("lineage", lake_of(here), *words)
    if "no text: " not in shown_alone.out:
        assert shown_alone.code == 0
    else:
        one_line(shown_alone, 3, "--text: the text of the record is not at hand: ")
        assert why in shown_alone.err
        assert "0/prose.txt" in shown_alone.out
    assert {one["text"] for one in after if one["source"] == "prose"} <= {None} | {one["text"] for one in shown}
    said = {one["problem"] for one in after if one["source"] == "prose" and one["text"] is None}
    assert said
    assert all(why in one for one in said), said
    assert all(one["text"] for one in after if one["source"] == "code")


def test_a_lost_listing_and_a_lost_plan_are_named(here: Path) -> None:
    url = lake_of(here)
    record = next(one for one in spans(here, "--step", 3) if one["source"] == "prose")
    words = ["--source", "prose", "--file", "prose.txt", "--record", record["record"], "--plan-dir", here]
    [plans] = (here / "lake").glob("*/plans")
    for path in plans.iterdir():
        if path.is_file():
            path.unlink()
    [shown] = {one["problem"] for one in texts(here, 3)}
    assert "the text of the plan is not in the lake" in shown
    one_line(produce("find", url, *words), 3, "the plan of source prose is not in the lake; restore")
    one_line(replayed(here), 3, "is not in the lake; restore its object plans/")
    shutil.rmtree(next((here / "lake").glob("*/sources")))
    numbered = produce("lineage", url, "--step", 3, "--json")
    assert {one["file"] for one in numbered.document["spans"]} == {None}
    assert numbered.err.count("the list of files of source") == 2
    assert "#0" in produce("lineage", url, "--step", 3).out
    one_line(produce("find", url, *words), 3, "the list of files of source prose is not in the lake; restore")


def test_from_another_directory_than_the_plans_the_way_there_is_named(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, said = (
        lake_of(here),
        f"prose.txt: no such file in {tmp_path}; restore it, or name the directory that the plan's",
    )
    one_line(produce("find", url, "--source", "prose", "--file", "prose.txt", "--record", 0), 3, said)
    one_line(produce("replay", url, "--steps", "0:1"), 3, "was in by --plan-dir")
    alone = produce("lineage", url, "--step", 3, "--text")
    one_line(alone, 3, "--text: the text of any of the ")
    assert said in alone.out


def test_a_replay_begins_anywhere_and_makes_the_wanted_ranks_alone(here: Path, tmp_path: Path) -> None:
    done = replayed(here, "--ranks", 1, "--json", steps="5:9").document
    assert (done["steps"], done["different"], done["ranks"]) == (4, [], [1])
    json_schemas.check("produce-replay", done)
    written = replayed(here, "--to", tmp_path / "out", steps="5:7")
    assert written.code == 0, written.err
    assert f": 4 files written to {tmp_path}/out, nothing compared with the lake" in written.out
    found = sorted(path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.safetensors"))
    assert found == [f"step-{step:09}/rank-{rank:05}.safetensors" for step in (5, 6) for rank in (0, 1)]
    listed = stepfs("ls", lake_of(here), "--step", 5, "--json").document["steps"][0]["files"]
    assert [one["size"] for one in listed] == [(tmp_path / "out" / name).stat().st_size for name in found[:2]]
    one_line(replayed(here, "--to", tmp_path / "out", steps="6:7"), 4, "name an empty directory")
    one_line(replayed(here, "--ranks", "2"), 2, "--ranks names rank 2; the lake has 2 data ranks")
    one_line(replayed(here, steps="9:5"), 2, "write A:B with A < B")
    one_line(replayed(here, steps="5:99"), 3, "step 12 is not in the lake")


@pytest.mark.parametrize(
    ("mutant", "said"), [
        (flip_a_token, "token 7 of source"),
        pytest.param(move_a_span, "span 0 is source", marks=pytest.mark.nightly),
        pytest.param(change_the_last_byte, "step 3, rank 1 (slice 1)", marks=pytest.mark.nightly),
    ], ids=["token", "span", "byte"],
)  # fmt: skip
def test_a_planted_difference_is_found_and_described(tmp_path, monkeypatch, mutant, said):
    monkeypatch.setattr(session, "put_step", partial(put_planted, mutant))
    made(tmp_path, steps=6)
    done = replayed(tmp_path, steps="0:6")
    assert done.code == 8
    assert done.err.startswith("stepfs-produce: step 3, rank 1 (slice 1): ")
    assert said in done.err
    assert done.out.endswith(": 1 differ\n")
    assert replayed(tmp_path, "--ranks", 0, steps="0:6").code == 0
    assert replayed(tmp_path, steps="4:6").code == 0


def test_a_changed_file_is_refused_by_name_or_found(here: Path) -> None:
    path = here / "prose.txt"
    before = path.read_bytes()
    path.write_bytes(behind_the_head(path))
    done = replayed(here, "--json")
    assert done.code == 8
    assert done.document["different"]
    found = [one["what"] for one in done.document["differences"]]
    assert any("source prose, file #0" in what for what in found)
    assert all("source prose, file #0" in what or "a file was edited" in what for what in found)
    path.write_bytes(b"P" + before[1:])
    one_line(replayed(here), 4, "prose.txt begins otherwise than when this plan began; restore it")
    path.write_bytes(before[:-1])
    one_line(replayed(here), 4, "is shorter than when this plan began")
    path.unlink()
    one_line(replayed(here), 3, "prose.txt")
    path.write_bytes(before)
    assert replayed(here).code == 0


def test_a_change_of_plan_is_replayed_as_the_restart_did_it(here: Path) -> None:
    plan = here / "plan.yaml"
    plan.write_text(plan.read_text().replace("code: 30", "code: 60"))
    made(here, steps=ONE_PLAN_STEPS + 6, more=("--accept-changes",))
    plan.unlink()  # the lake knows both
    done = replayed(here, "--json", steps=f"3:{ONE_PLAN_STEPS + 6}").document
    assert (done["steps"], done["different"], len(done["plans"])) == (15, [], 2)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    tokenizer = "tokenizer: {kind: huggingface, file: words.json, eos: none, pad: '[UNK]'}\n"
    plan.write_text(plan.read_text() + tokenizer)
    write_words(tmp_path / "words.json", "prose")
    made(tmp_path, steps=2)
    assert replayed(tmp_path, steps="0:2").code == 0
    write_words(tmp_path / "words.json", "code")
    one_line(replayed(tmp_path, steps="0:2"), 4, "the tokenizer is not the one that made these steps")
    problems = {one["problem"] for one in texts(tmp_path, 0)}
    assert all("other tokens come of" in problem for problem in problems), problems
    (tmp_path / "words.json").unlink()
    ended = replayed(tmp_path, steps="0:2")
    assert (ended.code, ended.err.count("\n"), "words.json" in ended.err) == (3, 1, True)
    assert all("words.json" in one["problem"] for one in texts(tmp_path, 0))


def write_words(path: Path, word: str) -> None:
    model = Tokenizer(models.WordLevel({"[UNK]": 0, word: 1, "1": 2}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    path.write_text(model.to_str())


def test_libraries_of_another_version_are_named_beside_a_difference(here: Path) -> None:
    runs = list((here / "lake").glob("*/plans/*-libraries/*"))
    assert len(runs) == 3
    for path in runs:
        kept = json.loads(path.read_text())
        path.write_text(json.dumps({**kept, "numpy": "1.0", "pyarrow": None}))
    assert "numpy" not in replayed(here).err
    (here / "prose.txt").write_bytes(behind_the_head(here / "prose.txt"))
    ended = replayed(here)
    assert "stepfs-produce: then numpy 1.0, now " in ended.err
    assert "stepfs-produce: then pyarrow not installed, now " in ended.err


def test_the_steps_of_two_producers_are_told_apart(here: Path) -> None:
    made(here, more=("--producer-id", "other"))
    whole = f"0:{2 * ONE_PLAN_STEPS}"
    one_line(replayed(here, steps=whole), 2, "are of other, plan; choose one with --producer-id")
    for producer in ("plan", "other"):
        done = replayed(here, "--producer-id", producer, "--json", steps=whole).document
        assert (done["steps"], done["different"]) == (ONE_PLAN_STEPS, [])
    one_line(replayed(here, "--producer-id", "nobody", steps=whole), 3, "none is of the producer nobody")
    record = spans(here, "--step", 3)[0]
    words = [
        "--source", record["source"], "--file", record["file"], "--record", record["record"], "--plan-dir", here,
    ]  # fmt: skip
    found = produce("find", lake_of(here), *words, "--json").document["found"]
    assert {(one["producer"], one["step"] % ONE_PLAN_STEPS) for one in found} == {("plan", 3), ("other", 3)}


def test_a_record_of_a_second_corpus_is_found_and_what_is_not_at_hand_is_named(here: Path, tmp_path: Path) -> None:
    """Two producers, a source of one name, other files: every file of either had exit code 3."""
    other = tmp_path / "other"
    plan = write_plan(other)
    (other / "code/1.jsonl").write_text((other / "code/0.jsonl").read_text())
    (other / "code/0.jsonl").write_text('{"text": "another file of that name"}\n')
    done = produce("run", plan, lake_of(here), "--limit-steps", 4, "--workers", 1, "--producer-id", "second")
    assert done.code == 0, done.err

    def found(directory: Path, file: object, record: object, *more: object) -> Ended:
        words = ["--source", "code", "--file", file, "--record", record, "--plan-dir", directory]
        return produce("find", lake_of(here), *words, *more)

    steps = ((here, 3, "plan", 1), (other, ONE_PLAN_STEPS + 1, "second", 0))
    for directory, step, producer, others in steps:
        span = next(one for one in spans(here, "--step", step) if one["source"] == "code")
        document = found(directory, span["file"], span["record"], "--json").document
        json_schemas.check("produce-find", document)
        assert {(one["producer"], one["step"]) for one in document["found"]} >= {(producer, step)}
        assert {one["producer"] for one in document["found"] + document["missing"]} == {producer}
        assert [one["producer"] for one in document["not_searched"]] == ["second"] * others
    one_line(found(here, "9.jsonl", 0), 3, "the source has no such file")
    one_line(found(here, "0.jsonl", 1), 4, "0.jsonl is longer than")  # of "second"; "plan" has no such record
    ended = produce(
        "find", lake_of(here), "--source", "prose", "--file", "prose.txt", "--record", 1, "--plan-dir", here
    )
    one_line(ended, 3, "0/prose.txt has no record at 1")


def test_the_held_out_side_is_replayed_as_it_was(tmp_path: Path) -> None:
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text() + "defaults: {holdout: 40%}\n")
    made(tmp_path, steps=3, more=("--holdout",))
    assert replayed(tmp_path, steps="0:3").code == 0


def test_a_fork_knows_its_own_steps_and_names_its_parent(here: Path) -> None:
    fork, end = f"file://{here}/fork", ONE_PLAN_STEPS
    assert stepfs("fork", lake_of(here), fork).code == 0
    record = texts(here, 2)[0]
    words = ["--source", record["source"], "--file", record["file"], "--record", record["record"]]
    ended = produce("find", fork, *words, "--plan-dir", here)
    inherited = f"steps 0:{end} were not searched: they are steps 0:{end} of {lake_of(here)}; ask that lake"
    one_line(ended, 3, f"no step from {end} on holds it; {inherited}")
    assert "no step that was searched holds" in ended.err
    assert stepfs("fork", lake_of(here), f"{fork}-2", "--skip", "4:7").code == 0
    ended = produce("find", f"{fork}-2", *words, "--plan-dir", here)
    one_line(ended, 3, f"steps 4:{end - 3} were not searched: they are steps 7:{end} of {lake_of(here)}")
    one_line(ended, 3, "steps 0:4 were not searched: they are steps 0:4 of ")
    done = produce("run", here / "plan.yaml", fork, "--limit-steps", end + 4, "--workers", 1)
    assert done.code == 0, done.err
    theirs = produce("lineage", fork, "--step", 2, "--text", "--plan-dir", here, "--json").document
    assert theirs["plan"] is None
    assert theirs["spans"] == texts(here, 2)
    assert produce("lineage", fork, "--step", end + 2, "--json").document["plan"] is not None
    one_line(produce("find", fork, *words, "--plan-dir", here), 3, f"no step from {end} on holds it; {inherited}")
    record = produce("lineage", fork, "--step", end + 1, "--json").document["spans"][0]
    words = ["--source", record["source"], "--file", record["file"], "--record", record["record"]]
    found = produce("find", fork, *words, "--plan-dir", here, "--json").document
    json_schemas.check("produce-find", found)
    assert (found["found"][0]["step"], found["not_searched"][0]["next_step"]) == (end + 1, end)
    ended = produce("replay", fork, "--steps", f"2:{end + 1}", "--plan-dir", here)
    assert (ended.code, lake_of(here) in ended.err) == (3, True), ended.err
