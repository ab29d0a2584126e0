"""The steps of a plan do not depend on hash order or on the vector instructions that numpy finds (hazards P1, P2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from planned import small_plan, steps

TESTS = Path(__file__).parent
# A step whose costs and lengths are long enough for numpy's vector code, beside the small plan.
PROGRAM = """
import numpy as np
from planned import small_plan, steps
from stepfs_producer.plan.balance.partition import Method, partition
from stepfs_producer.plan.order import order_key, record_order
order = record_order(order_key(1, 2, "code", 3), 4096)
print(order.tobytes().hex()[-64:], partition(order // 7, 64, Method.AUTO).tobytes().hex()[:512])
print([plan.digest() for plan in steps(*small_plan(), 6)])
"""


def said(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS), **environment},
        capture_output=True,
        text=True,
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
    core = np._core._multiarray_umath
    found = [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]
    assert said(PYTHONHASHSEED="0", NPY_DISABLE_CPU_FEATURES=" ".join(found)) == plain
