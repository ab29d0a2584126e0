"""What `stepfs status` shows people, from documents alone."""

from __future__ import annotations

import re

from stepfs.cli.commands.status import change_lines, counts_of, mount_lines, producer_lines
from stepfs.data.waiting import Cause
from stepfs.doctor.waits import finding, of_cause

NOW_S = 1_700_000_030.0

EARLIER = {
    "lake": "s3://training/run",
    "group": "pretrain",
    "pid": 4711,
    "uptime_s": 100.0,
    "frontier": 1800,
    "first_step": 1200,
    "last_step": 1795,
    "sealed": False,
    "waited_s": 2.0,
    "waiting": 0,
    "open_files": 8,
    "bytes_read": 0,
    "data": {
        "bytes_fetched": 0, "primed": 0, "requests": 100, "hits": 10, "misses": 0, "hedges": 0, "retries": 2, "corrupt": 0
    },
    "cache": {"memory_bytes": 3 << 30, "memory_limit_bytes": 8 << 30, "disk_bytes": 0, "disk_limit_bytes": 0},
    "store": {"reachable": True, "trouble": None, "requests": 50},
}  # fmt: skip
LATER = {
    **EARLIER,
    "uptime_s": 102.0,
    "frontier": 1834,
    "last_step": 1830,
    "waited_s": 2.5,
    "bytes_read": 2 << 20,
    "data": {**EARLIER["data"], "bytes_fetched": 4 << 20, "primed": 1 << 30, "requests": 110, "hits": 19, "misses": 1},
    "store": {"reachable": True, "trouble": None, "requests": 72},
}


def test_the_screen_of_a_mount_at_work():
    assert list(mount_lines(LATER, EARLIER)) == [
        "s3://training/run, group pretrain  (pid 4711, up 1 min)",
        "",
        "steps    1200 to 1834; last read 1830",
        "readers  waited 25.0 % of the time; 0 waiting for a commit, 8 open files",
        "reading  1.00 MiB/s through the daemon, 512 MiB/s primed, 90.0 % of opens found their bytes",
        "fetched  2.00 MiB/s in 5.0/s GETs, 2 retries",
        "cache    3.00 GiB of 8.00 GiB in memory, 0 B of 0 B on disk",
        "store    answers, 11.0/s requests; trouble: none",
    ]


def test_what_grows_of_a_mount_is_what_it_has_read():
    of_its_lake = {"total_bytes": 7, "next_step": 1835}
    read = {"bytes read": 2 << 20, "bytes fetched": 4 << 20}
    assert counts_of(LATER | of_its_lake) == {"steps read": 1830, **read}
    assert counts_of(LATER | of_its_lake | {"last_step": None}) == read
    assert counts_of(of_its_lake) == {"steps": 1835, "bytes": 7}


def test_a_nearer_place_has_a_line_once_it_was_asked():
    near = {"near_hits": 120, "near_bytes": 8 << 20, "near_absent": 3, "near_corrupt": 0, "near_failed": 1}
    lines = list(mount_lines({**LATER, "data": LATER["data"] | near}, EARLIER))
    assert lines[6] == "near     4.00 MiB/s in 120 blocks; 3 absent, 0 corrupt, 1 failed"


def test_the_first_look_and_a_restarted_daemon_have_the_rates_since_the_start():
    for before in ({}, {**EARLIER, "pid": 1}):
        lines = list(mount_lines(LATER, before))
        assert lines[3].startswith("readers  waited 2.5 % of the time")
        assert lines[4].endswith("95.0 % of opens found their bytes")
    assert list(mount_lines(LATER, LATER))[4].endswith("no opens")


def test_trouble_stands_out():
    away = {**LATER, "store": {"reachable": False, "trouble": "no route", "requests": 0}}
    assert list(mount_lines(away, {}))[-1] == "store    DOES NOT ANSWER, 0.0/s requests; trouble: no route"


def test_a_document_without_most_fields_is_shown_all_the_same():
    assert next(mount_lines({"lake": "file:///x"}, {})).startswith("file:///x")


def test_a_producer_that_no_longer_commits_shows_for_how_long():
    def state(age_s, **facts):
        each = {"epoch": 1, "next_seq": 900, "time": NOW_S - age_s, **facts}
        row = list(producer_lines({"p": each}, round(NOW_S * 1000)))[-1]
        return re.fullmatch(r"p +1 +900 +(.*?) +\S+Z", row)[1]

    assert state(59) == "live"
    assert state(-5) == "live", "its clock is ahead of ours"
    assert state(60) == "quiet for 1 min"
    assert state(7300) == "quiet for 2 h 1 min"
    assert state(200_000) == "quiet for 2 d 7 h"
    assert state(200_000, retired=True) == "retired"


def of_waits(shares, **minute):
    seconds = {cause: 100 * share for cause, share in shares.items()}
    last = {
        "span_s": 58.0,
        "shares": shares,
        "blocked_s": 1.0,
        "read_per_s": None,
        "committed_per_s": None,
        "ahead": None,
    }
    counts = dict.fromkeys(shares, 2)
    return {**LATER, "waits": {"seconds": seconds, "count": counts, "blocked_s": 2.0, "last_minute": last | minute}}


def test_who_must_act_and_when_the_trainer_reaches_the_frontier():
    rates = {"read_per_s": 4.4, "committed_per_s": 4.1, "ahead": 55}
    lines = list(mount_lines(of_waits({"commit": 0.028, "store": 0.003}, **rates), {}))
    assert lines[3:7] == [
        (
            "readers  waited 3.1 % of the last minute: 2.8 % for commits (the trainer reads 4.4 steps/s, producers commit 4.1),"
            " 0.3 % for bytes from the store; 0 waiting for a commit, 8 open files"
        ),
        "waits    3.1 s in 4 waits so far, each reader's added up (2.8 s commit, 0.3 s store); at least one waited in 2.0 s",
        "act      the producers must act: start more of them, or give each more workers; `stepfs status LAKE` names the quiet ones",
        "outlook  at this pace the trainer reaches the frontier in 3 min (the trainer reads 4.4 steps/s, producers commit 4.1)",
    ]
    for same in ({"read_per_s": 4.1}, {"ahead": 0}, {"ahead": None}, {"committed_per_s": None}):
        assert not [line for line in mount_lines(of_waits({}, **rates | same), {}) if line.startswith("outlook")]


def test_each_cause_has_words_and_advice_and_a_little_waiting_needs_none():
    for cause in Cause:
        assert of_cause(cause) != f"for {cause}"
        (what, advice) = finding(of_waits({str(cause): 0.5}))
        assert what.startswith(f"alive, but its readers waited 50.0 % of the last minute: 50.0 % {of_cause(cause)}")
        assert advice
    assert finding(of_waits({"commit": 0.01})) is None
    assert finding(LATER) is None, "a daemon of another version"
    assert not [line for line in mount_lines(of_waits({"commit": 0.01}), {}) if line.startswith("act")]


def test_a_reader_that_was_refused_and_one_that_waits_are_told_with_the_log():
    refused = [{"time": 3661.0, "step": 5, "error": "ENOENT", "why": "waited 1 s in vain: …"}]
    told = {"waiting_for": "waiting for step 6; …", "refused": refused, "log": "/var/log/stepfs/run.log"}
    lines = list(mount_lines(of_waits({}) | told, {}))
    assert "now      waiting for step 6; …; its log is /var/log/stepfs/run.log" in lines
    assert (
        "refused  step 5 with ENOENT at 01:01:01Z: waited 1 s in vain: …; its log is /var/log/stepfs/run.log" in lines
    )


def test_a_changed_plan_says_since_when_and_how_far_groups_are_before_it():
    def line(standing, **plan):
        facts = {"digest": "0123456789abcdef", "since_lake_step": 40, "since_is_exact": True}
        return list(change_lines({"p": {"plan": facts | plan}, "q": {"plan": None}, "r": {}}, standing))

    begins = "changed   plan 01234567 of p since step 40"
    assert line({}) == [begins]
    assert line({"run": 28, "eval": 40, ":replica": 3, "a": 39}) == [f"{begins}; a is 1 before it; run is 12 before it"]
    assert line({"run": 40, ":replica": 3}) == [f"{begins}; every group is behind it"]
    assert line({}, since_is_exact=False) == ["changed   plan 01234567 of p since about step 40"]
    assert line({}, since_lake_step=None) == []
    retired = {"plan": {"digest": "0", "since_lake_step": 4, "since_is_exact": True}, "retired": True}
    assert list(change_lines({"p": retired}, {})) == []
