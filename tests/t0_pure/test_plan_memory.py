"""How much memory a run asks for: what a refusal names is enough, and what may be used adds up."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepfs.errors import UsageError
from stepfs_producer.plan.file.schema import Output, Plan, Text
from stepfs_producer.run.compile import compile_plan
from stepfs_producer.run.memory import memory_of

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
