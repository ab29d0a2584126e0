"""Tags: a text of each record that the files say of its spans, whatever the kind of file, and what is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load

from stepfs.errors import UsageError
from stepfs.payload import NoSpansError, UnreadablePayloadError, read_spans
from stepfs.torch import load as load_torch
from stepfs.torch import micro_batches
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import PayloadSpec, SampleGroup, StepSpans, StepTask, cut_to, gathered
from stepfs_producer.plan.file.digest import normalised, plan_digest, plan_of_text, plan_text
from stepfs_producer.plan.model import parsed_plan
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.ragged import Ragged
from stepfs_producer.run.prepare import LocatedPlan, prepare_plan, source_specs
from stepfs_producer.run.tokenize import _check
from stepfs_producer.sources.listing import Layout, list_corpus
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import TAG_BYTES_MAX, Records

SETTINGS: dict[str, Any] = {"output": {"mesh": "dp=1", "sequence_length": 8}}


def plan_of(**source: object) -> Any:
    return parsed_plan({**SETTINGS, "sources": {"a": {"format": "jsonl", "files": "a.jsonl", **source}}})


def records_of(path: Path, lines: list[dict[str, object]], **more: object) -> Records:
    """The records of a file, in its order."""
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    [spec] = source_specs(plan_of(files=str(path), shuffle="none", **more)).values()
    task = Layout(spec, list_corpus(spec)).task(BlockAddress(0, 0, 0))
    assert task is not None
    return read_block(spec, task).records


def texts(tags: Ragged | None) -> list[str]:
    assert tags is not None
    return [one.tobytes().decode() for one in tags]


@pytest.fixture
def task() -> StepTask:
    """Three records of a source with tags, one of them a pair, and one of a source without; two ranks of two micro-batches."""
    numbers = np.arange(3)
    tags = Ragged.of_bytes([b"web", b"", "κώδικας".encode()])
    both = Ragged(np.array([2, 4]), np.array([0, 0, 2]))
    ids = Ragged(np.arange(12, dtype=np.int32), np.array([4, 8, 12]))
    tagged = SampleGroup(ids, None, numbers, numbers, (), both, numbers * 0 + 1, tags)
    plain = SampleGroup(Ragged(np.arange(4, dtype=np.int32), np.array([4])), None, numbers[:1], numbers[:1])
    spans = [  # rank, micro, row, column, tokens, source, epoch, group, record, first
        [0, 0, 0, 0, 4, 0, 0, 0, 2, 0],
        [0, 1, 0, 0, 3, 0, 0, 0, 0, 1],
        [1, 0, 0, 0, 4, 1, 0, 1, 0, 0],
        [1, 0, 0, 4, 4, 0, 0, 0, 1, 0],
    ]
    step = StepSpans((2, 2, 1), 8, ("a", "b"), np.array(spans), np.zeros((4, 0), np.int64))
    return gathered(step, [tagged, plain], pairs=True)


def spec_of(ext: str, **more: Any) -> PayloadSpec:
    return PayloadSpec(ext, labels_shifted=True, padding=0, vocabulary=16, pairs=True, tagged=True, **more)


@pytest.mark.parametrize("ext", [".safetensors", ".pt", ".tar"])
def test_each_span_has_the_tag_of_its_record(ext: str, task: StepTask) -> None:
    first, second = construct(spec_of(ext), task)[0]
    assert read_spans(ext, first).tags == ("κώδικας", "κώδικας", "web"), "both documents of a pair"
    assert read_spans(ext, second).tags == ("", ""), "one of a source without, and one whose tag is empty"


@pytest.mark.parametrize("ext", [".safetensors", ".pt", ".tar"])
def test_a_file_of_each_micro_batch_has_its_own(ext: str, task: StepTask) -> None:
    files = construct(spec_of(ext, of_micro_batch=True), task)[0]
    assert [read_spans(ext, file).tags for file in files] == [("κώδικας", "κώδικας"), ("web",), ("", ""), ()]


@pytest.mark.parametrize("compact", [False, True])
def test_loops_find_them_where_the_page_says(compact: bool, task: StepTask, tmp_path: Path) -> None:
    wanted = ["κώδικας", "κώδικας", "web"]
    (tmp_path / "a.safetensors").write_bytes(construct(spec_of(".safetensors", compact=compact), task)[0][0])
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert json.loads(file.metadata()["tags"]) == wanted
    batch: Any = load_torch(construct(spec_of(".pt", compact=compact), task)[0][0], "cpu")
    assert batch["tags"] == wanted
    assert [one["tags"] for one in micro_batches(batch)] == [wanted[:2], wanted[2:]]


def test_a_rank_alone_is_made_of_the_same_bytes(task: StepTask) -> None:
    for ext in (".safetensors", ".pt", ".tar"):
        both = construct(spec_of(ext), task)[0]
        assert [construct(spec_of(ext), cut_to(task, [rank]))[0] for rank in (0, 1)] == [[one] for one in both]


def test_a_step_without_a_tagged_source_says_so_and_a_plan_without_tags_says_nothing(task: StepTask) -> None:
    alone = SampleGroup(Ragged(np.arange(4, dtype=np.int32), np.array([4])), None, *[np.zeros(1, np.int64)] * 2)
    span = np.array([[0, 0, 0, 0, 4, 0, 0, 0, 0, 0]])
    plain = gathered(StepSpans((1, 1, 1), 8, ("b",), span, np.zeros((1, 0), np.int64)), [alone])
    spec = PayloadSpec(".safetensors", labels_shifted=True, padding=0, vocabulary=16)
    assert read_spans(".safetensors", construct(spec, plain)[0][0]).tags == ()
    assert b"tags" not in construct(spec, plain)[0][0]
    spec = PayloadSpec(".safetensors", labels_shifted=True, padding=0, vocabulary=16, tagged=True)
    assert read_spans(".safetensors", construct(spec, plain)[0][0]).tags == ("",)


def test_a_reader_that_knows_no_tags_reads_all_else(task: StepTask) -> None:
    plain = PayloadSpec(".safetensors", labels_shifted=True, padding=0, vocabulary=16, pairs=True)
    for mine, theirs in zip(
        construct(spec_of(".safetensors"), task)[0], construct(plain, replace(task, tags=None))[0], strict=True
    ):
        arrays, others = load(mine), load(theirs)
        assert arrays.keys() == others.keys()
        assert all(np.array_equal(arrays[name], others[name]) for name in arrays)


def test_damaged_ones_are_named(task: StepTask) -> None:
    payload = construct(spec_of(".safetensors"), task)[0][0]
    begin = payload.index(b"web")
    with pytest.raises(UnreadablePayloadError, match="do not fit"):
        read_spans(".safetensors", payload.replace(b', \\"web\\"]', b"]         "))
    read_spans(".safetensors", payload[:begin] + b"w\xc3\xa4"[:3] + payload[begin + 3 :])  # another text is a text
    with pytest.raises(NoSpansError):
        read_spans(".npy", payload)


def test_a_record_without_a_text_of_256_bytes_cannot_be_decoded(tmp_path: Path) -> None:
    long = "ä" * (TAG_BYTES_MAX // 2)
    tags: list[object] = ["web", "", long, long + "b", None, 7, ["web"], "\ud800"]
    lines = [{"text": "one", "lang": one} for one in tags] + [{"text": "one"}]
    found = records_of(tmp_path / "a.jsonl", lines, tag="lang")
    assert texts(found.tags) == ["web", "", long, *[""] * 6]
    assert list(found.bad) == [3, 4, 5, 6, 7, 8]
    assert found.bad[3] == "a tag of 257 bytes in the field 'lang'; at most 256 are kept"
    assert found.bad[4] == "null in the field 'lang'"
    assert found.bad[8] == "no field 'lang' for its tag; it has 'text'"
    assert texts(found.part(1, 3).tags) == ["", long]


def test_a_tag_within_a_field_beside_ids_and_whole_records(tmp_path: Path) -> None:
    line: dict[str, object] = {"ids": [1, 2], "meta": {"lang": "de"}, "messages": []}
    for more in ({"tokens_field": "ids"}, {"pair": {"chosen": "a", "rejected": "b"}}, {"transform": "json:dumps"}):
        assert texts(records_of(tmp_path / "a.jsonl", [line], tag="meta.lang", **more).tags) == ["de"]


def test_a_tag_moves_no_record_to_another_side_of_a_holdout(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"text": f"{n}", "lang": "de"} for n in range(40)]
    sides = [
        records_of(tmp_path / "a.jsonl", lines, holdout="40%", **more).dropped.tolist()
        for more in ({}, {"tag": "lang"})
    ]
    assert sides[0] == sides[1]
    assert 0 < sum(sides[0]) < 40


def test_files_without_room_are_refused_by_name() -> None:
    with pytest.raises(
        UsageError, match=r"sources\.a\.tag: \.npy files have no room for tags; choose \.safetensors, \.pt or \.tar"
    ):
        parsed_plan({
            "output": {**SETTINGS["output"], "ext": ".npy"},
            "sources": {"a": {"format": "jsonl", "files": "a.jsonl", "tag": "lang"}},
        })  # fmt: skip


@pytest.mark.parametrize("kind", ["text", "megatron"])
def test_formats_without_fields_have_no_tag(kind: str) -> None:
    with pytest.raises(UsageError, match="tag"):
        plan_of(format=kind, tag="lang")


def test_a_column_called_tags_stays_one_where_no_source_has_any() -> None:
    output = {**SETTINGS["output"], "columns": {"tags": {"dtype": "uint8", "shape": []}}}
    source = {"format": "jsonl", "files": "a.jsonl", "transform": "json:loads"}
    parsed_plan({"output": output, "sources": {"a": source}})
    with pytest.raises(UsageError, match=r"output\.columns\.tags: the tags of source 'a' have this name"):
        parsed_plan({"output": output, "sources": {"a": {**source, "tag": "lang"}}})


def test_megatron_files_of_tokenize_have_no_room() -> None:
    with pytest.raises(
        UsageError, match=r"source a has tag, and \.bin files have no room for tags; tokenise it in each run"
    ):
        _check(LocatedPlan(plan_of(tag="lang")), "a")


def test_a_plan_says_it_and_a_source_with_another_is_another(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "lang": "de", "kind": "web"}\n')
    identities = set()
    for more in ({}, {"tag": "lang"}, {"tag": "kind"}):
        plan = plan_of(files=str(tmp_path / "a.jsonl"), **more)
        assert normalised(plan)["sources"]["a"].get("tag") == more.get("tag")
        assert plan_digest(plan_of_text(plan_text(plan))) == plan_digest(plan)
        listings = {name: list_corpus(spec) for name, spec in source_specs(plan).items()}
        prepared = prepare_plan(LocatedPlan(plan), listings)
        assert prepared.payloads.tagged is bool(more)
        identities.add(prepared.rules.sources["a"].identity)
    assert len(identities) == 3
