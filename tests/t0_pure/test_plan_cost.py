"""What a plan costs: exact or refused costs, checked results of functions, and memory that a refusal names and that
is enough.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepfs.errors import UsageError
from stepfs_producer.plan.cost import EXACT_MAX, CostModel, row_costs
from stepfs_producer.plan.file.schema import Output, Plan, Text
from stepfs_producer.run.memory import memory_of
from stepfs_producer.run.prepare import compile_plan


def columns(*tokens: int) -> dict[str, np.ndarray]:
    numbers = np.arange(len(tokens))
    return {"tokens": np.array(tokens, np.int64), "source": numbers, "record": numbers, "first": numbers}


def test_hidden_size_gives_the_cost_of_a_transformer() -> None:
    assert CostModel.of_hidden_size(4096) == CostModel(24576, 1)
    assert CostModel(24576, 1).of_samples(columns(1, 4096)).tolist() == [24577, 24576 * 4096 + 4096**2]


def test_the_documents_of_a_row_add_up() -> None:
    costs = CostModel(2, 1).of_samples(columns(3, 4, 5))
    assert row_costs(costs, np.array([1, 1, 0]), 3).tolist() == [35, 15 + 24, 0]


def test_a_cost_that_overflows_int64_names_a_divisor() -> None:
    with pytest.raises(UsageError, match=r"1048576 tokens overflows.*divide its coefficients by 4096"):
        CostModel(0, 1 << 25).of_samples(columns(5, 1 << 20))
    with pytest.raises(UsageError, match="overflow; divide them by 2048"):
        row_costs(np.full(4, 1 << 62, np.int64), np.zeros(4, np.int64), 1)


def test_rows_that_could_not_be_compared_exactly_name_a_divisor() -> None:
    assert row_costs(np.array([EXACT_MAX // 8]), np.array([3]), 8)[3] == EXACT_MAX // 8
    with pytest.raises(UsageError, match=r"8 rows.*exceed 2\*\*53; divide the cost by 2$"):
        row_costs(np.array([EXACT_MAX // 8 + 1]), np.array([3]), 8)


def raising(of):
    raise KeyError("pixels")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda of: of["tokens"] * 1.5, "returned float64; round the costs and return int64"),
        (lambda of: np.where(of["tokens"] == 4, np.nan, 1.0), r"float64 \(NaN for sample address 1\)"),
        (lambda of: 4 - of["tokens"], "cost of sample address 2 is -1"),
        (lambda of: of["tokens"] << 52, r"cost of sample address 0 is \d+; return costs from 0 to 2\*\*53"),
        (lambda of: of["tokens"][:2], r"shape \(2,\) for 3 samples"),
        (lambda of: None, "for 3 samples; return one cost each"),
        (raising, "the cost function raising raised KeyError: 'pixels'"),
    ],
)
def test_a_users_function_is_held_to_its_word(call, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CostModel(call=call).of_samples(columns(3, 4, 5), lambda index: f"address {index}")


def test_a_users_function_sees_the_columns() -> None:
    cost = CostModel(call=lambda of: of["tokens"] * 10 + of["source"])
    assert cost.of_samples(columns(3, 4)).tolist() == [30, 41]


MIB = 1 << 20


@dataclass
class OfBlocks:
    largest_block_bytes: int

    @property
    def layout(self):
        return self


def rules(length: int):
    plan = Plan(output=Output(mesh="dp=64", sequence_length=length), sources={"a": Text("x")})
    return compile_plan(plan, listings={}, tokenizer_digest="").rules


@given(
    st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=40),
    st.sampled_from([64, 4096, 65536]),
    st.integers(1, 8),
)
@example([64 * MIB] * 40, 4096, 2)
def test_what_a_refusal_names_is_enough_and_no_less_is(blocks, length, workers):
    sources = tuple(map(OfBlocks, blocks))
    with pytest.raises(UsageError) as caught:
        memory_of(1, rules(length), sources, workers)
    named = int(re.search(r"the run needs (\d+) MiB", str(caught.value))[1]) * MIB
    memory = memory_of(named, rules(length), sources, workers)
    assert memory.held_bytes >= 0
    assert memory.least <= named < memory.least + MIB
    with pytest.raises(UsageError):
        memory_of(named - MIB, rules(length), sources, workers)


def test_samples_ahead_and_pending_uploads_share_what_lies_above_the_least():
    sources = (OfBlocks(8 * MIB),)
    for total in (512 * MIB, 8192 * MIB):
        memory = memory_of(total, rules(64), sources, 2)
        assert memory.pending_bytes == min(512 * MIB, total // 4)
        assert memory.held_bytes == total - (memory.least - 64 * MIB) - memory.pending_bytes
