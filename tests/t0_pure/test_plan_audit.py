"""The quickstart's audit of a plan sees every way in which a document can fail to be there exactly once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from quickstart.audit import audit
from quickstart.audit_plan import audit_plan
from quickstart.corpus import train_tokenizer

TEXTS = ["one document", "another one, which is longer", "the third"]


@pytest.fixture
def corpus(tmp_path):
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "code.jsonl").write_text("".join(lines))
    (tmp_path / "prose.jsonl").write_text(lines[0])
    train_tokenizer(tmp_path)
    (tmp_path / "mount").mkdir()
    return tmp_path


@pytest.fixture
def documents(corpus):
    """Offset of each document of `code` and its ids."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    ids = [[*tokenizer.encode(text).ids, tokenizer.token_to_id("<|endoftext|>")] for text in TEXTS]
    offsets = np.cumsum([0, *(len(json.dumps({"text": text})) + 1 for text in TEXTS)])
    return list(zip(offsets.tolist(), ids, strict=False))


def write(corpus, step, pieces):
    """A rank's file with one micro-batch of pieces (offset, first token, ids) of `code`."""
    directory = corpus / f"mount/step-{step:09d}"
    directory.mkdir()
    spans, row = [], []
    for offset, first, ids in pieces:
        spans.append([0, len(row), len(ids), 0, 0, 0, offset, first])
        row += ids
    arrays = {"input_ids": np.array([row], np.int64), "spans": np.array(spans, np.int64).reshape(-1, 8)}
    save_file(arrays, directory / "rank-00000.safetensors", metadata={"sources": '["code"]'})


def test_whole_documents_in_pieces_are_whole(corpus, documents):
    (one, a), (two, b), (three, c) = documents
    write(corpus, 0, [(two, 4, b[4:]), (one, 0, a)])
    write(corpus, 1, [(three, 0, c), (two, 0, b[:4])])
    found = audit_plan(corpus / "mount", corpus)
    assert found.faults == ()
    assert (found.documents, found.files, found.tokens) == ({"code": 3}, 2, len(a + b + c))


def test_one_document_of_a_source_may_lack_its_end(corpus, documents):
    (one, a), (two, b), _ = documents
    write(corpus, 0, [(one, 0, a[:2])])
    assert audit_plan(corpus / "mount", corpus).faults == ()
    write(corpus, 1, [(two, 0, b[:2])])
    assert audit_plan(corpus / "mount", corpus).faults == ("code: 2 documents without end",)


@pytest.mark.parametrize(
    "pieces",
    [
        lambda offset, ids: [(offset, 0, ids), (offset, 0, ids)],
        lambda offset, ids: [(offset, 0, ids[:3]), (offset, 2, ids[2:])],
        lambda offset, ids: [(offset, 0, ids[:3]), (offset, 4, ids[4:])],
        lambda offset, ids: [(offset, 1, ids[1:])],
        lambda offset, ids: [(offset, 0, [*ids[:-2], ids[-1] + 5, ids[-1]])],
        lambda offset, ids: [(offset, 0, [*ids, ids[-1]])],
    ],
    ids=["twice", "overlap", "gap", "no beginning", "other token", "more behind"],
)
def test_anything_else_is_a_fault(corpus, documents, pieces):
    offset, ids = documents[1]
    write(corpus, 0, pieces(offset, ids))
    [fault] = audit_plan(corpus / "mount", corpus).faults
    assert f"code at byte {offset}" in fault


def write_text(mount, step, pieces):
    """A rank's file with one micro-batch of pieces (file, offset, first byte, text); a piece with None ends there."""
    directory = mount / f"step-{step:09d}"
    directory.mkdir(parents=True)
    spans, row = [], []
    for file, offset, first, text, *ends in pieces:
        ids = [*text, *([256] if ends else [])]
        spans.append([0, len(row), len(ids), 0, 0, file, offset, first])
        row += ids
    arrays = {"input_ids": np.array([row], np.int64), "spans": np.array(spans, np.int64).reshape(-1, 8)}
    save_file(arrays, directory / "rank-00000.safetensors", metadata={"sources": '["text"]'})


FIRST = [(0, 0, 0, b"one\n", None), (1, 0, 0, b"th")]
SECOND = [(1, 0, 2, b"ree\n", None), (1, 6, 0, b"more\n", None)]


@pytest.mark.parametrize(
    ("steps", "fault"), [
        ({0: FIRST, 1: SECOND}, None),
        ({0: FIRST, 2: SECOND}, "step 1 is missing"), ({0: FIRST}, "tokens missing or twice"),
        ({0: FIRST, 1: [*SECOND, SECOND[0]]}, "tokens missing or twice"),
        ({0: FIRST, 1: SECOND[:1]}, "ends at byte 6 of 11"),
        ({0: [(0, 0, 0, b"two\n", None), FIRST[1]], 1: SECOND}, "other bytes than in the source"),
        ({0: [*FIRST, (2, 0, 0, b"x", None)], 1: SECOND}, "not among the sources"),
    ], ids=["whole", "step", "end", "twice", "record", "bytes", "elsewhere"],
)  # fmt: skip
def test_the_audit_of_text_sees_every_way_in_which_a_byte_can_fail(tmp_path, steps, fault):
    corpus = [tmp_path / "b", tmp_path / "a"]
    for directory in corpus:
        directory.mkdir()
    (tmp_path / "b/1.py").write_text("one\n")
    (tmp_path / "b/2.pyc").write_bytes(b"\0")
    (tmp_path / "a/0.py").write_text("three\nmore\n")
    for step, pieces in steps.items():
        write_text(tmp_path / "mount", step, pieces)
    found = audit(tmp_path / "mount", [f"{directory}/*.py" for directory in corpus])
    assert (found.files, found.source_bytes) == (len(steps), 15)
    assert [fault in one for one in found.faults[:1]] == ([] if fault is None else [True])
