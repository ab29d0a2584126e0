"""The planner under suspicion: mutants and an audit that must find them, and what differs between machines."""

from __future__ import annotations

import ast
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from finished import ran
from planned import small_plan, steps
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from quickstart.audit import audit
from quickstart.audit_plan import audit_plan
from quickstart.corpus import train_tokenizer
from stepfs_producer.plan import balance, mix, pack, planner
from stepfs_producer.plan.pack import best_fit
from stepfs_producer.plan.step import StepPlan

STEPS = 8


def complaints(plans: list[StepPlan], honest: list[StepPlan]) -> set[str]:
    """What is wrong with steps that should be the `honest` ones."""
    found = set()
    if [plan.digest() for plan in plans] != [plan.digest() for plan in honest]:
        found.add("other steps")
    if any(sum(source.debt for source in plan.after.sources.values()) for plan in plans):
        found.add("debts do not cancel")
    return found


@pytest.fixture(scope="module")
def honest() -> list[StepPlan]:
    return steps(*small_plan(), STEPS)


def later_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: of equally long documents, the one that was drawn last is packed first."""

    def flipped(lengths: list[int], *, rows: int, sequence_length: int) -> list[int]:
        kept = len(best_fit(lengths, rows=rows, sequence_length=sequence_length))
        return best_fit(lengths[:kept][::-1], rows=rows, sequence_length=sequence_length)[::-1]

    monkeypatch.setattr(pack, "best_fit", flipped)


def later_of_equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: of equally heavy bins, the rows are taken in another order."""
    monkeypatch.setattr(balance, "greedy", lambda costs, bins, greedy=balance.greedy: greedy(costs, bins)[::-1])


def what_is_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: a source with nothing buffered loses its turn, as if it were exhausted."""
    honest_draw = mix.draw

    def hasty(shares, debts, samples, **how):
        return honest_draw(shares, debts, [replace(one, ended=True) for one in samples], **how)

    monkeypatch.setattr(planner, "draw", hasty)


def floor_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the rest of a division is dropped when a source hands its debt on."""

    def floored(total: int, weights: list[int]) -> list[int]:
        return [total * weight // sum(weights) for weight in weights]

    honest = mix.with_live_debts

    def handed_on(*arguments, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mix, "apportion", floored)
            return honest(*arguments, **more)

    monkeypatch.setattr(planner, "with_live_debts", handed_on)


def account_without_what_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: the total that is accounted is the room of a step, not what it kept."""
    honest_account = mix.account

    def roomy(shares, debts, kept):
        debts = [debt + share * (2048 - sum(kept)) for debt, share in zip(debts, shares, strict=True)]
        return honest_account(shares, debts, kept)

    monkeypatch.setattr(planner, "account", roomy)


MUTANTS = {
    later_of_equals: "other steps", later_of_equal_costs: "other steps", what_is_buffered: "other steps",
    floor_shares: "debts do not cancel", account_without_what_was_cut: "debts do not cancel",
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, honest, monkeypatch):
    mutant(monkeypatch)
    assert MUTANTS[mutant] in complaints(steps(*small_plan(), STEPS, group=5), honest)


def test_without_a_mutant_nothing_is_wrong(honest: list[StepPlan]) -> None:
    assert complaints(steps(*small_plan(), STEPS, group=5), honest) == set()


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
    spans, row, side = [], [], [0] * (step % 2)  # a plan with pairs has one more column
    for file, offset, first, text, *ends in pieces:
        ids = [*text, *([256] if ends else [])]
        spans.append([0, len(row), len(ids), 0, 0, file, offset, first, *side])
        row += ids
    arrays = {"input_ids": np.array([row], np.int64), "spans": np.array(spans, np.int64)}
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


TESTS = Path(__file__).parent
# A step whose costs and lengths are long enough for numpy's vector code, beside the small plan.
PROGRAM = """
import numpy as np
from planned import small_plan, steps
from stepfs_producer.plan.balance import Method, partition
from stepfs_producer.plan.order import block_key, record_order
order = record_order(block_key(1, 2, "code", 3, 0), 4096)
print(order.tobytes().hex()[-64:], partition(order // 7, 64, Method.AUTO).tobytes().hex()[:512])
print([plan.digest() for plan in steps(*small_plan(), 6)])
"""


def said(**environment: str) -> str:
    done = ran(
        [sys.executable, "-c", PROGRAM],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS), **environment},
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def plain() -> str:
    return said(PYTHONHASHSEED="0")


def test_hash_order_does_not_show(plain: str) -> None:
    assert said(PYTHONHASHSEED="4242") == plain
    assert plain.splitlines()[-1] == str([plan.digest() for plan in steps(*small_plan(), 6)])


def test_vector_instructions_do_not_show(plain: str) -> None:
    found = np.show_config(mode="dicts")["SIMD Extensions"]["found"]
    assert said(PYTHONHASHSEED="0", NPY_DISABLE_CPU_FEATURES=" ".join(found)) == plain


PLAN = Path(__file__).resolve().parents[2] / "producer/stepfs_producer/plan"
INEXACT = {"mean", "average", "float", "float32", "float64", "std", "sqrt", "dot", "sort"}


def inexact(tree: ast.AST) -> list[str]:
    """What may give another result on another machine: floats, and sorts that are not stable."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found.append(f"line {node.lineno}: /")
        elif isinstance(node, ast.Constant) and isinstance(node.value, float):
            found.append(f"line {node.lineno}: {node.value}")
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            unstable = name == "argsort" and words.get("kind") != "'stable'"
            if unstable or name in INEXACT or (name == "bincount" and "weights" in words):
                found.append(f"line {node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", sorted(PLAN.rglob("*.py")), ids=lambda path: str(path.relative_to(PLAN)))
def test_no_float_and_no_unstable_sort_in_the_planner(path: Path) -> None:
    assert inexact(ast.parse(path.read_text())) == []


def test_what_is_inexact_is_found() -> None:
    wrong = "a / 2; x.mean(); np.argsort(x); np.bincount(x, weights=y); 0.5; np.argsort(x, kind='stable'); a // 2"
    assert [one.rpartition(" ")[2] for one in inexact(ast.parse(wrong.replace("; ", "\n")))] == [
        "/", "mean", "argsort", "bincount", "0.5",
    ]  # fmt: skip
