"""Times that no calendar has: a producer whose clock is wrong breaks no command that shows when it committed."""

from __future__ import annotations

import json_schemas
import pytest
from lakes import SLICES, commit, stepfs

from stepfs.cli.columns import time_text
from stepfs.cli.live import live_lines
from stepfs.clock import SystemClock
from stepfs.format.ids import INTEGER_MAX

FAR_MS = 10**15  # 10^12 seconds: the year 33658
LAST_OF_9999_MS = 253_402_300_799_000


@pytest.mark.parametrize(
    ("time_ms", "text"), [
        (0, "-"), (1, "1970-01-01T00:00:00Z"),
        (LAST_OF_9999_MS, "9999-12-31T23:59:59Z"),
        (LAST_OF_9999_MS + 1000, "253402300800 s"), (FAR_MS, "1000000000000 s"),
        (INTEGER_MAX, f"{INTEGER_MAX // 1000} s"), (10**40, f"{10**37} s"), (-(10**40), f"{-(10**37)} s"),
    ],
)  # fmt: skip
def test_any_number_has_a_text(time_ms: int, text: str) -> None:
    assert time_text(time_ms) == text


def test_the_screen_of_a_mount_shows_a_producer_whose_clock_is_wrong() -> None:
    document = {"producers": {"p": {"epoch": 1, "next_seq": 1, "time": FAR_MS / 1000}}}
    assert "1000000000000 s" in "\n".join(live_lines(document, None, now_s=1.7e9))


def test_status_stats_and_ls_show_steps_of_a_producer_whose_clock_is_wrong(file_url, tmp_path, monkeypatch):
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(2), producer_id="right")
    with monkeypatch.context() as wrong:
        wrong.setattr(SystemClock, "now_ms", lambda _self: FAR_MS)
        commit(file_url, range(1), producer_id="wrong")
    for command in ("status", "stats"):
        shown = stepfs(command, file_url)
        assert shown.code == 0, shown.err
        [line] = [line for line in shown.out.splitlines() if line.startswith("wrong ")]
        assert "1000000000000 s" in line
    document = stepfs("stats", file_url, "--json").document
    json_schemas.check("stats", document)
    assert document["last_time"] >= FAR_MS / 1000
    assert stepfs("ls", file_url, "--step", 2, "--json").code == 0
