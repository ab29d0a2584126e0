"""COMMIT.md names tests as its evidence, which have to exist, and numbers, which have to be those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepfs.format.commit import COMMIT_ID_BYTES, COMMIT_TGBS_MAX
from stepfs.format.ids import PRODUCERS_MAX, SEGMENT_STEPS
from stepfs.lake.control import _LIST_AFTER_S
from stepfs.lake.log.append import _QUIET_TIMES_MAX
from stepfs.lake.log.quiet import EVERY_S, QUIET_S, RESTED_S, SAY_AFTER_S
from stepfs.lake.log.snapshots import _VERSIONS_MAX
from stepfs_producer import pace
from stepfs_producer.commit_loop import IDENTITY_CHECK_S, LOSSES_WORTH_SAYING
from stepfs_producer.lead.limit import LOOK_JITTER, LOOK_S_MAX, LOOK_S_MIN
from stepfs_producer.pending import UNCOMMITTED_FACTOR, UNCOMMITTED_TGBS_MAX
from stepfs_producer.rebase import COMMIT_DESCRIPTOR_BYTES_MAX, POSITIONS_BYTES_MAX
from stepfs_producer.snapshots import SETTLE_S_MAX

ROOT = Path(__file__).resolve().parents[2]
PROSE = " ".join((ROOT / "producer" / "COMMIT.md").read_text().split())
WORDS = ["no", "one", "two", "three", "four", "five"]
MINUTE_S = 60


def test_every_test_that_the_prose_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", PROSE))
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert len(named) > 10
    assert named <= tests


def test_every_section_names_a_test() -> None:
    """But for those that promise nothing."""
    text = (ROOT / "producer" / "COMMIT.md").read_text()
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert [title for title, body in sections.items() if "`test_" not in body and "/test_" not in body] == [
        "Rejected"
    ]


@pytest.mark.parametrize(
    "sentence",
    [
        f"again every {IDENTITY_CHECK_S:g} s while committing",
        f"and {COMMIT_ID_BYTES} random bytes",
        f"({COMMIT_TGBS_MAX} batches, {COMMIT_DESCRIPTOR_BYTES_MAX >> 20} MiB of descriptors)",
        f"while all positions together exceed {POSITIONS_BYTES_MAX >> 20} MiB",
        f"a lake takes {PRODUCERS_MAX:,} producer ids",
        f"T = max({1000 * pace.INTERVAL_S_MIN:g} ms, (N̂ − 1) · v̂ / {pace.LOAD:g})",
        f"silent for {pace.RECENT_MS / 1000:g} s of log time, or for {pace.RECENT_INTERVALS} T",
        f"± {100 * pace.JITTER:g} % jitter",
        f"doubling from {2 * pace.BACKOFF_EXPOSURES:g} v̂, at most T",
        f"within {1 + pace.JITTER:g} T",
        f"T is at most {WORDS[int(pace.TURNS_MAX)]} *turns*",
        f"up to {WORDS[int(1 / pace.CROWDED_SHARE_MIN)]} times as often",
        f"exposure stay below {pace.LOAD:g}",
        f"capped at {1 / pace.INTERVAL_S_MIN:g} commits/s",
        f"After {LOSSES_WORTH_SAYING} losses in a row",
        f"in the first {QUIET_S:g} s of every {EVERY_S:g} s",
        f"when {WORDS[int(pace.TURNS_MAX)]} turns have passed",
        f"After {SAY_AFTER_S:g} s they log once",
        f"gives up after {WORDS[_QUIET_TIMES_MAX]} of them",
        f"within {RESTED_S:g} s of a gap of {QUIET_S:g} s",
        f"silent for {QUIET_S:g} s in {QUIET_S + RESTED_S:g} s at most",
        f"reach {UNCOMMITTED_FACTOR} × that, or {UNCOMMITTED_TGBS_MAX} batches",
        f"after {LOOK_S_MIN:g} s, then after pauses that double up to {LOOK_S_MAX:g} s (± {100 * LOOK_JITTER:g} %)",
        f"not looked for {'a minute' if _LIST_AFTER_S == MINUTE_S else _LIST_AFTER_S}",
        f"({SEGMENT_STEPS} steps), or crosses a multiple of {_VERSIONS_MAX} versions",
        f"waits up to {SETTLE_S_MAX:g} s for a snapshot",
    ],
)
def test_the_numbers_of_the_prose_are_those_of_the_code(sentence: str) -> None:
    assert sentence in PROSE
