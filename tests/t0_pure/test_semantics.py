"""`fs/SEMANTICS.md` names a test for every promise, which has to exist, and numbers, which have to be the code's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from stepfs.checkpoints.watch import _LAG_S_MAX
from stepfs.cli.commands import reclaim
from stepfs.data.fetch.concurrency import _CONNECTIONS_MIN, CONNECTIONS_MAX
from stepfs.data.prefetch.hinted import STREAMS_MAX
from stepfs.data.prefetch.order_hint import LISTED_STEPS_MAX
from stepfs.follow import fleet_interval
from stepfs.follow.consumer_group import _REPORT_S, INTERVAL_S
from stepfs.follow.follower import IDENTITY_CHECK_S
from stepfs.follow.poll_interval import INTERVAL_S_MAX
from stepfs.format.ids import SEGMENT_STEPS
from stepfs.lake.fleet import _BEAT_S_PER_NODE, BEAT_S, FRESH_INTERVALS
from stepfs.lake.log.lone_entries import SEGMENT_SHARE_BYTES
from stepfs.lake.log.reader import _MISSES_PER_FLOOR_PROBE
from stepfs.mount.options import DEADLINE_S
from stepfs.view.tree import AHEAD_STEPS_MAX

ROOT = Path(__file__).parents[2]
GRACE = inspect.signature(reclaim.reclaim).parameters["grace"].default
PROSE = " ".join((ROOT / "fs/SEMANTICS.md").read_text().split())
WORDS = {2: "two", 3: "three", 5: "five", 8: "eight", 10: "ten"}
FEWEST = fleet_interval.NODES_MIN
LOOK_NODES, BEAT_NODES = 1 / fleet_interval._LOOK_S_PER_NODE, 1 / _BEAT_S_PER_NODE


def test_every_promise_names_tests_that_exist():
    text = (ROOT / "fs/SEMANTICS.md").read_text()
    named = set(re.findall(r"`(test_\w+)(?:\.py)?`", text))
    written = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        written |= {path.stem} | set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    assert named <= written, sorted(named - written)
    promises = re.split(r"^(?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(promise.partition(".")[0]) for promise in promises] == list(range(1, len(promises) + 1))
    assert [promise for promise in promises if "`test_" not in promise] == []


@pytest.mark.parametrize(
    "sentence",
    [
        f"an eighth of the time between steps, at most {INTERVAL_S_MAX:g} s",
        f"longer where {FEWEST} or more mounts share a lake (rule 22)",
        f"or {WORDS[INTERVAL_S_MAX]} while nothing is read and no step comes (longer with more than {LOOK_NODES:g} mounts",
        f"`--grace` ({'an hour' if GRACE == '1h' else GRACE}, by the store's clock)",
        f"that takes up to {WORDS[_REPORT_S[1] / 60]} minutes",
        f"up to {'a minute' if _LAG_S_MAX == IDENTITY_CHECK_S else _LAG_S_MAX} late",
        f"or within {_MISSES_PER_FLOOR_PROBE * INTERVAL_S_MAX:g} s (",
        f"after {DEADLINE_S:g} s they fail with `ETIMEDOUT`",
        f"names of the next {AHEAD_STEPS_MAX} steps",
        f"and one every {IDENTITY_CHECK_S:g} s, which checks",
        f"one per poll interval, at most one per {'second' if INTERVAL_S == 1.0 else INTERVAL_S}",
        f"one PUT every {BEAT_S:g} s for the fleet view",
        f"in {WORDS[_REPORT_S[0] / 60]} to {WORDS[_REPORT_S[1] / 60]} minutes while readers move on",
        f"N ≥ {FEWEST} mounts with groups (fewer change nothing): none polls more often than every N ms",
        f"more often than every max({INTERVAL_S:g} s, N/{LOOK_NODES:g} s)",
        f"more often than every max({BEAT_S:g} s, N/{BEAT_NODES:g} s)",
        f"older than {WORDS[FRESH_INTERVALS]} of the longest intervals",
        f"up to {WORDS[int(fleet_interval.SLOWER_MAX)]} times less often",
        f"one per {SEGMENT_STEPS} steps for their index",
        f"at most {SEGMENT_SHARE_BYTES >> 10} KiB for each",
        f"from {_CONNECTIONS_MIN} to {CONNECTIONS_MAX}.",
        f"more than {LISTED_STEPS_MAX:,} steps",
        f"At most {STREAMS_MAX} orders",
    ],
)
def test_the_numbers_of_the_promises_are_those_of_the_code(sentence):
    assert sentence in PROSE
