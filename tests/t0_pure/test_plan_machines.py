"""The steps of a plan do not depend on hash order or on the vector instructions that numpy finds (hazards P1, P2)."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from finished import ran
from planned import small_plan, steps

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
