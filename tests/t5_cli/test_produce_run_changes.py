"""`stepfs-produce run` into a lake that has seen another plan: what may change does, what may not is refused by name."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path

import model_files
import pytest
import trio
from committed import committed
from lakes import Ended, produce, stepfs
from tokenizers import Tokenizer

from spans_audit import pieces_of
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer import Producer
from stepfs_producer.commit.uploads import unpack_position
from stepfs_producer.plan.step import SourceState, State, read_position
from stepfs_producer.run import prepare

PLAN = """\
version: 1
output: {ext: .safetensors, mesh: "dp=2", micro_batch_tokens: 512}
stages: [{from: 0, sequence_length: 128}, {from: 4, sequence_length: 512}]
defaults: {holdout: 10%}
sources:
  code:  {format: jsonl, files: code/}
  prose: {format: text, records: lines, files: prose.txt}
mix: {code: 30, prose: 70}
"""
WITHOUT_CODE = PLAN.replace("  code:  {format: jsonl, files: code/}\n", "").replace("code: 30, ", "")


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    lines = [json.dumps({"text": f"code {number} " + "x" * (number * 137 % 900)}) for number in range(200)]
    (tmp_path / "code" / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prose.txt").write_text(
        "".join(f"prose {number} " + "y" * (number * 131 % 700) + "\n" for number in range(300))
    )
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def run(plan: Path, lake: str, *arguments: object) -> Ended:
    return produce("run", plan, lake, "--workers", 1, *arguments)


def position(lake: str) -> State:
    async def read() -> State:
        store = open_store(lake)
        log = await LogReader.open(store, await open_lake(store))
        await store.aclose()
        return read_position(unpack_position(log.state.producers["plan"].position))

    return trio.run(read)


def tokens_read(lake: str) -> dict[tuple, list[tuple[int, int]]]:
    """(epoch, address) of each record → its spans, in order."""
    found: dict[tuple, list[tuple[int, int]]] = {}
    for _, payloads in committed(lake):
        for payload in payloads:
            for piece in pieces_of(".safetensors", payload):
                found.setdefault((piece.epoch, piece.address), []).append((piece.first, len(piece.ids)))
    return {key: sorted(spans) for key, spans in found.items()}


def test_a_source_that_left_and_came_back_goes_on_where_it_was(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 6).returncode == 0
    left = position(file_url).sources["code"]
    plan.write_text(WITHOUT_CODE)
    changed = run(plan, file_url, "--limit-steps", 9, "--accept-changes")
    assert changed.returncode == 0
    assert "the changed plan makes the steps from 6 on\n" in changed.stderr
    status = stepfs("status", file_url).stdout
    assert f"changed   plan {position(file_url).plan[:8]} of plan since step 6\n" in status
    assert position(file_url).since == 6
    dormant = position(file_url).sources["code"]
    assert (dormant.epoch, dormant.taken, dormant.into, dormant.tokens) == (
        (left.epoch, left.taken, left.into, left.tokens)
    )
    plan.write_text(PLAN)
    assert run(plan, file_url, "--limit-steps", 15, "--accept-changes").returncode == 0
    assert position(file_url).sources["code"].tokens > left.tokens
    cut = Counter()
    for (_, address), spans in tokens_read(file_url).items():
        at = 0
        for first, count in spans:  # also across the stage that changes the sequence length
            assert first == at, (address, spans)
            at += count
        cut[address[0]] += len(spans) > 1
    assert min(cut["code"], cut["prose"]) > 0


def test_a_file_that_was_edited_in_place_is_found_where_a_block_was_begun(plan: Path, file_url: str) -> None:
    prose = plan.with_name("prose.txt")
    assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    assert position(file_url).sources["prose"].taken
    data = prose.read_bytes()
    end = data.index(b"\n", 100_000)  # behind what is compared when a file is opened
    prose.write_bytes(data[:end] + b"y" + data[end + 1 :])  # two records are one: each cursor behind them is wrong
    begun = position(file_url).sources["prose"]
    for refused in (run(plan, file_url, "--limit-steps", 4), produce("check", plan, file_url)):
        assert (refused.returncode, refused.stderr.count("\n")) == (4, 1), refused.stderr
        assert "source prose: 0/prose.txt: read otherwise than when this plan began a block of them" in refused.stderr
        assert "--accept-changes" in refused.stderr
    prose.write_bytes(data)
    assert run(plan, file_url, "--limit-steps", 3).returncode == 0
    assert len(committed(file_url)) == 3
    prose.write_bytes(data[:end] + b"y" + data[end + 1 :])
    accepted = run(plan, file_url, "--limit-steps", 6, "--accept-changes")
    assert accepted.returncode == 0, accepted.stderr
    assert "the rest of the block is left out" in accepted.stderr
    assert position(file_url).sources["prose"].cursor > (begun.epoch + 1, 0, 0, 0, 0), "it has one block"
    assert run(plan, file_url, "--limit-steps", 8).returncode == 0


def test_a_begun_block_that_cannot_be_read_is_told_in_a_line(plan: Path, file_url: str, monkeypatch) -> None:
    assert run(plan, file_url, "--limit-steps", 2).returncode == 0

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error", "/corpus/prose.txt")

    monkeypatch.setattr(prepare, "block_crc32c", fails)
    ended = run(plan, file_url, "--limit-steps", 4)
    assert (ended.returncode, ended.stderr.count("\n")) == (4, 1), ended.stderr
    assert "/corpus/prose.txt: Input/output error; make its files readable" in ended.stderr


def test_a_source_that_became_another_is_refused_as_such_and_not_for_its_block(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    plan.write_text(PLAN.replace("records: lines", "records: files"))
    refused = run(plan, file_url, "--limit-steps", 4, "--accept-changes")
    assert refused.returncode == 4, refused.stderr
    assert "source prose is not the one that this lake has taken samples of" in refused.stderr


def test_a_holdout_does_not_get_into_the_lake_of_its_plan(plan: Path, file_url: str) -> None:
    assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    refused = run(plan, file_url, "--limit-steps", 4, "--holdout")
    assert refused.returncode == 4
    assert "--holdout" in refused.stderr
    assert len(committed(file_url)) == 2


def test_samples_that_another_version_made_otherwise_are_told_and_accepted(plan, file_url, monkeypatch) -> None:
    pairs = ({"prompt": f"{number}?", "chosen": "yes" * (number % 9 + 1), "rejected": "no"} for number in range(300))
    (plan.parent / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    plan.write_text(PLAN.replace("files: code/", "files: pairs.jsonl, pair: {}"))
    with monkeypatch.context() as before:
        before.setattr("stepfs_producer.run.identity._REVISION", 1)
        assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    refused = run(plan, file_url, "--limit-steps", 4)
    assert refused.returncode == 4
    assert (
        "source code: pair makes other samples than in its steps so far, by another version of stepfs (answers"
        in refused.stderr
    )
    assert refused.stderr.endswith("add --accept-changes to go on with them from step 2 on\n")
    accepted = run(plan, file_url, "--limit-steps", 4, "--accept-changes")
    assert accepted.returncode == 0, accepted.stderr
    assert "warning: source code: pair makes other samples" in accepted.stderr
    assert run(plan, file_url, "--limit-steps", 6).returncode == 0, "once"
    read = tokens_read(file_url)
    pairs_read = [spans for (_, address), spans in read.items() if address[0] == "code"]
    assert {(len(spans), spans[0][0]) for spans in pairs_read} == {(2, 0)}


@pytest.mark.parametrize("changed", ["found", "written", "template"])
def test_what_stands_beside_a_tokenizer_may_change_where_that_is_accepted(plan, file_url, monkeypatch, changed) -> None:
    """A version of before found fewer special tokens than this one does: no plan file could undo that."""
    directory, model = plan.parent, Tokenizer.from_str(model_files.gpt2())
    model.add_special_tokens(["<bos>"])
    model.save(str(directory / "tokenizer.json"))
    beside, template = directory / "special_tokens_map.json", directory / "chat_template.jinja"
    beside.write_text(json.dumps({"bos_token": "<bos>"}))
    template.write_text("{{ bos_token }}{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}")
    talk = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]}
    (directory / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 500)
    tokenizer = "tokenizer: {kind: huggingface, file: tokenizer.json}\nsources:"
    plan.write_text(PLAN.replace("sources:", tokenizer).replace("files: code/", "files: talks.jsonl, chat: messages"))
    with monkeypatch.context() as before:
        if changed == "found":
            before.setattr(prepare, "special_tokens", lambda _: (("bos_token", ""),))
        elif changed == "written":
            beside.write_text(json.dumps({"bos_token": "<|endoftext|>"}))
        assert run(plan, file_url, "--limit-steps", 2).returncode == 0
    beside.write_text(json.dumps({"bos_token": "<bos>"}))
    if changed == "template":
        template.write_text(template.read_text().replace(": ", "> "))
    refused = run(plan, file_url, "--limit-steps", 4)
    assert (refused.returncode, refused.stderr.count("\n")) == (4, 1)
    assert "because the chat template or the special tokens beside the tokenizer changed; add --acc" in refused.stderr
    accepted = run(plan, file_url, "--limit-steps", 4, "--accept-changes")
    assert accepted.returncode == 0, accepted.stderr
    assert run(plan, file_url, "--limit-steps", 6).returncode == 0, "once"
    plan.write_text(plan.read_text().replace("chat: messages", "chat: {messages: messages, learn: last}"))
    other = run(plan, file_url, "--limit-steps", 8, "--accept-changes")
    assert (other.returncode, "source code is not the one" in other.stderr) == (4, True), other.stderr


def test_former_sources_count_for_what_a_position_can_become(plan: Path, file_url: str) -> None:
    """P9: small today, it would outgrow a commit after months."""
    assert run(plan, file_url, "--limit-steps", 1).returncode == 0
    now = position(file_url)
    former = {f"former-{number:03}": SourceState("i" * 16, "l" * 32) for number in range(800)}
    grown = State(now.plan, now.step + 1, {**now.sources, **former})
    with Producer(file_url, producer_id="plan") as producer:
        payload = committed(file_url)[0][1][0]
        producer.append([payload, payload], position=grown.position())
    names = "".join(f"  new-{number:03}: {{format: text, files: prose.txt}}\n" for number in range(60))
    weights = "".join(f", new-{number:03}: 1" for number in range(60))
    plan.write_text(PLAN.replace("mix:", f"{names}mix:").replace("prose: 70", f"prose: 70{weights}"))
    refused = run(plan, file_url, "--limit-steps", 3, "--accept-changes")
    assert refused.returncode == 2, refused.stderr
    assert "800 of them no longer in the plan" in refused.stderr


@pytest.mark.parametrize("made", ["fifo", "unreadable"])
def test_a_source_that_is_no_readable_file_is_refused_by_name(plan: Path, file_url: str, made: str) -> None:
    import os  # noqa: PLC0415

    if made == "fifo":
        (plan.parent / "prose.txt").unlink()
        os.mkfifo(plan.parent / "prose.txt")
    else:
        (plan.parent / "prose.txt").unlink()
        (plan.parent / "prose.txt").symlink_to(plan.parent / "prose.txt")
    refused = run(plan, file_url, "--limit-steps", 1)
    assert refused.returncode in {2, 3, 4}
    assert "prose.txt" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_run_whose_corpus_grew_goes_on_in_a_fork_as_in_its_lake(plan, file_url, tmp_path):
    """A fork has the listings of its parent's sources: files that came later are no reason to refuse."""
    child = f"file://{tmp_path}/fork"
    assert run(plan, file_url, "--limit-steps", 4).returncode == 0
    forked = stepfs("fork", file_url, child)
    assert forked.code == 0, forked.err
    (tmp_path / "code" / "b.jsonl").write_text('{"text": "came later"}\n')
    for lake in (file_url, child):
        done = run(plan, lake, "--limit-steps", 6)
        assert done.returncode == 0, done.stderr
    assert position(file_url) == position(child)
