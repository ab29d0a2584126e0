"""What commands show while they work: on terminals of every kind, and line by line where there is none."""

from __future__ import annotations

import io
import itertools
import os
import queue
import re
import signal
import socket
import sys
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
from lakes import SLICES, commit, stepfs
from terminal import Screen, Terminal

from stepfs._internal import interruption
from stepfs.cli import live
from stepfs.cli.columns import table
from stepfs.cli.live import History, Job, Letters, Mark
from stepfs_producer.cli import reports

UNICODE, ASCII = Letters(), Letters.of("ANSI_X3.4-1968")
NAMES = ["web-crawl-2026-filtered", "web-crawl-2026-whole", "code"]
COLOUR = re.compile(rb"\x1b\[[\d;]*(3|4|9|10)\dm")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def worked(
    clock: Clock, *, follows: bool = False, name: str = "verify s3://training/pretrain", seconds: int = 70
) -> Job:
    """A job at 3 steps/s, and at 6 in its second half."""
    job = Job(name, follows=follows, clock=clock)
    rows = [[name, f"{n}.00%", str(10**n)] for n, name in enumerate(NAMES)]
    steps = 0
    for second in range(seconds):
        clock.now_s += 1
        steps += 3 if second < seconds // 2 else 6
        notes = [
            "readers   waited 3.1 % of the last minute: 2.8 % for commits, 0.3 % for bytes; and so on",
            "",
            *table(["SOURCE", "SHARE", "TOKENS"], rows),
        ]
        job.update(Mark({"steps": steps, "bytes": steps << 20}, 1000, notes, "web 75.00%"))
        job.frame(80, 24, UNICODE)
    return job


def texts(rows) -> list[str]:
    return ["".join(text for text, _ in row) for row in rows]


@pytest.mark.parametrize("letters", [UNICODE, ASCII], ids=["utf-8", "ascii"])
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 24), (132, 50), (40, 8)])
def test_a_frame_fits(width, height, follows, letters):
    name = "verify s3://a-bucket-of-a-long-name/and/a/prefix/of/many/parts/that-has-a-last-one"
    shown = texts(worked(Clock(), follows=follows, name=name).frame(width, height, letters))
    assert len(shown) <= height
    assert max(map(len, shown)) <= width
    assert shown[0].startswith("verify s3://a-bu")
    assert "last-one" in shown[0]
    assert all(line.isascii() for line in shown) or letters is UNICODE
    if height > 20:
        assert all(any(name[:6] in line and name[-4:] in line for line in shown) for name in NAMES)
    else:
        assert re.fullmatch(r"(…|\.\.\.) and \d+ lines more", shown[-1])


def test_it_says_the_total_the_rates_with_their_history_and_the_time_that_is_left():
    title, bar, done, steps, size, *_ = texts(worked(Clock()).frame(80, 24, UNICODE))
    assert title.endswith(" 1:10")
    assert bar.endswith(" 31.5%")
    assert bar.count("━") == 22
    assert done == "315 of 1000 steps, 315 MiB, 2 min left"
    assert re.fullmatch(r"steps +5\.1\d/s +▅{12,14}█{34,36}", steps)
    assert re.fullmatch(r"bytes +5\.1\d MiB/s +▅{12,14}█{34,36}", size)


def test_a_clock_that_goes_on_shows_a_store_that_does_not_answer():
    clock = Clock()
    job, watched = worked(clock), worked(clock, follows=True)
    clock.now_s += 30
    assert texts(job.frame(80, 24, UNICODE))[0].endswith(" 2:50")
    assert "steps" in texts(job.frame(80, 24, UNICODE))[3]
    assert texts(watched.frame(80, 24, UNICODE))[0].endswith("no answer for 0:30")


def test_rates_begin_anew_where_a_count_does():
    history = History()
    for second, count in enumerate([0, 10, 30, 5, 6]):
        history.note(float(second), count)
    assert history.rates() == [1.0]
    assert UNICODE.line([0.0, 1.0, 2.0, 4.0]) == "▁▃▅█"
    assert ASCII.line([0.0, 4.0]) == "_#"
    assert UNICODE.line([0.0, 0.0]) == "▁▁"


def test_escape_sequences_of_others_are_not_sent_to_the_terminal():
    job = Job("verify \x1b]0;x\x07", clock=Clock())
    job.update(Mark({"steps": 1}, notes=["\x1b[2J", *table(["A\x1b[5m"], [["\x1b[6m"]])]))
    assert "\x1b" not in "".join(texts(job.frame(80, 24, UNICODE))) + job.line()


@pytest.fixture
def ticks(monkeypatch):
    """Passes 10 s of a job's clock at each call, and returns once its line, if there is one, is written."""
    clock, waits, permits = Clock(), queue.Queue(), queue.Queue()

    class Event:
        def wait(self, seconds):
            waits.put(seconds)
            return permits.get()

        def set(self):
            permits.put(True)

    monkeypatch.setattr(live, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    monkeypatch.setattr(live, "Job", lambda name: Job(name, clock=clock))

    def tick():
        assert waits.get() == 10.0
        clock.now_s += 10
        permits.put(False)
        waits.put(waits.get())  # it waits again

    return tick


def test_without_a_terminal_a_plain_line_comes_every_ten_seconds(ticks, monkeypatch, capsys):
    monkeypatch.setattr("stepfs.cli.failure._running", "stepfs")
    with live.progress("verify", "file:///lake") as job:
        ticks()
        job.update(Mark({"steps": 100, "bytes": 100 << 20}, 1000))
        ticks()
        job.update(Mark({"steps": 300, "bytes": 400 << 20}, 1000, said="1 error"))
        ticks()
    assert capsys.readouterr().err.splitlines() == [
        "stepfs: verify file:///lake: nothing yet after 10 s",
        "stepfs: verify file:///lake: 100 of 1000 steps, 100 MiB",
        "stepfs: verify file:///lake: 300 of 1000 steps, 400 MiB, 35 s left, 20 steps/s, 30.0 MiB/s; 1 error",
    ]


def test_a_run_without_a_terminal_says_its_shares_and_its_bottleneck(ticks, monkeypatch, capsys):
    monkeypatch.setattr("stepfs.cli.failure._running", "stepfs-produce")
    seconds = itertools.count()
    monkeypatch.setattr("stepfs_producer.cli.reports.time.monotonic", lambda: float(next(seconds)))
    totals = SimpleNamespace(
        tokens=0,
        state=SimpleNamespace(step=100),
        sources=lambda: {name: {"share": 0.5, "wanted": 0.5, "tokens": 7} for name in ("web", "code")},
        measures=lambda: {"fill": 1.0, "slowest_to_mean": 1.0, "planning_ms": 1.0},
        pace=lambda: "; bottleneck web (1.8 of 2 workers wanted); lead 40 steps",
    )
    with reports.showing_plan("plan", 1000) as show:
        show(totals, {})
        ticks()
        totals.tokens, totals.state.step = 5000, 120
        show(totals, {"web": 3})
        ticks()
    assert capsys.readouterr().err.splitlines()[1] == (
        "stepfs-produce: plan: 120 of 1000 steps, 5.0k tokens, 7 min left, 2 steps/s, 500 tokens/s; web 50.00%, "
        "code 50.00%; bottleneck web (1.8 of 2 workers wanted); lead 40 steps"
    )


def test_a_frame_is_one_write_over_the_one_before(monkeypatch):
    class Written(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

        def fileno(self):
            return 2

        def write(self, text):
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr", Written())
    with live.progress("verify", "file:///lake") as job:
        for steps in range(3):
            job.update(Mark({"steps": steps}, 3))
            sys.stderr.write("a line above\n")
    assert interruption._drawing is None
    *frames, last = [piece for piece in pieces if "\x1b[2K" in piece]
    assert all("verify file:///lake" in frame for frame in frames)
    screen = Screen(80, 24)
    screen.feed("".join(pieces).replace("\n", "\r\n"))
    assert screen.text == "\n".join(["a line above"] * 3)
    assert screen.cursor
    assert last


def test_a_run_goes_on_when_its_terminal_is_gone(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 200)
    words = [
        "text",
        f"file://{tmp_path}/lake",
        "-i",
        tmp_path / "a.txt",
        "--slices",
        1,
        "--seq-len",
        64,
        "--ext",
        ".bin",
    ]
    ours, theirs = os.openpty()
    with forked.Forked("stepfs_producer", *words, terminal=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"text-0-of-1" not in shown:
            shown += os.read(ours, 65536)
        os.close(ours)
        out, _ = process.communicate()
    assert (process.returncode, out[:12]) == (0, "text-0-of-1:")


def test_a_process_that_is_ended_in_the_middle_leaves_the_terminal_as_it_was(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(interruption, "_drawing", (write, b"\x1b[?1049l\x1b[?25h"))
    monkeypatch.setattr("os._exit", lambda code: os.write(write, b"%d" % code))
    interruption._end(130)
    os.close(write)
    with os.fdopen(read, "rb") as there:
        assert there.read() == b"\x1b[?1049l\x1b[?25h130"


@pytest.fixture
def silent():
    """The environment of a store that takes connections, and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield {
            "AWS_ENDPOINT_URL_S3": endpoint,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "x",
        }


LAKE = "s3://training/run"
COMMANDS = {
    "verify": ["stepfs", "verify", LAKE],
    "replicate": ["stepfs", "replicate", LAKE, "s3://backup/run"],
    "fork": ["stepfs", "fork", LAKE, "s3://training/other"],
    "reclaim": ["stepfs", "reclaim", LAKE],
    "status": ["stepfs", "status", LAKE, "--watch"],
    "plan into": ["stepfs-produce", "run", "plan.yaml", LAKE],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_shows_itself_before_the_store_answers_and_leaves_a_clean_terminal(
    name, silent, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text\n" * 200)
    (tmp_path / "plan.yaml").write_text(
        "output: {mesh: dp=1, sequence_length: 64}\nsources: {a: {format: text, files: a.txt}}\n"
        "mix: [{from: 0, weights: {a: 1}}]\n"
    )
    shown = Terminal(COMMANDS[name], env=silent)
    shown.until(lambda screen: f"{name} {LAKE}" in screen.text)
    assert not shown.screen.cursor
    assert shown.ended(signal.SIGINT) == 130
    assert shown.screen.cursor
    assert not shown.screen.other
    assert LAKE not in shown.screen.text or name == "plan into"
    assert not shown.screen.scrolled + shown.screen.wrapped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("name", ["verify", "status"])
def test_a_signal_that_ends_a_command_leaves_a_clean_terminal(name, number, silent):
    shown = Terminal(COMMANDS[name], env=silent)
    shown.until(lambda screen: f"{name} {LAKE}" in screen.text)
    assert shown.ended(number) == -number
    assert (shown.screen.cursor, shown.screen.other) == (True, False)


def test_a_watch_ends_once_nobody_can_see_it(lake):
    """Behind `nohup`, where the end of the terminal is no signal."""
    ignored = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    script = Path(sysconfig.get_path("scripts"))
    shown = Terminal([script / "python", "-c", ignored, script / "stepfs", "status", lake, "--watch"])
    shown.until(lambda screen: "tok-1" in screen.text)
    assert shown.left_alone() == 0


@pytest.mark.parametrize(("width", "env"), [(80, {}), (40, {"PYTHONIOENCODING": "ascii"}), (80, {"NO_COLOR": "1"})])
def test_a_watched_lake_fits_its_terminal(width, env, lake):
    shown = Terminal(["stepfs", "status", lake, "--watch"], width, env=env)
    shown.until(lambda screen: "tok-1" in screen.text and "0/s" in screen.text)  # there is a history
    inside = shown.screen.text
    assert shown.ended(signal.SIGINT) == 130
    assert (shown.screen.text, shown.screen.cursor, shown.screen.other) == ("", True, False)
    assert not shown.screen.scrolled + shown.screen.wrapped
    assert inside.isascii() == ("PYTHONIOENCODING" in env)
    assert bool(COLOUR.search(shown.written)) == ("NO_COLOR" not in env)


@pytest.mark.parametrize("command", ["verify", "status"])
def test_a_dumb_terminal_gets_no_control_codes(command, lake):
    shown = Terminal(["stepfs", command, lake, *(["--watch"] if command == "status" else [])], env={"TERM": "dumb"})
    shown.until(lambda screen: ("5 steps" if command == "verify" else "tok-1") in screen.text)
    shown.ended(signal.SIGINT)
    assert b"\x1b" not in shown.written


def test_what_is_printed_meanwhile_stands_above_the_screen(lake):
    shown = Terminal(["stepfs", "reclaim", lake, "--every", "100ms"])
    shown.until(lambda screen: screen.text.count("deleted 0 objects") >= 3)
    assert shown.ended(signal.SIGINT) == 130
    first, *lines = shown.screen.text.splitlines()
    assert first.startswith("deleted 0 objects")
    assert not any("looking" in line for line in lines)
    assert "reclaim file:" not in shown.screen.text


def test_each_command_says_how_far_it_is_and_of_what(file_url, tmp_path, monkeypatch):
    marks: list[Mark] = []
    monkeypatch.setattr(Job, "update", lambda _, mark: marks.append(mark))
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(600))  # more than a segment of the index

    def last(*words) -> tuple[dict[str, float], float | None]:
        marks.clear()
        assert stepfs(*words).err == ""
        assert [each.counts for each in marks] == sorted(
            [each.counts for each in marks], key=lambda one: [*one.values()]
        )
        return dict(marks[-1].counts), marks[-1].whole

    size = stepfs("verify", file_url, "--json").document["bytes"]
    assert last("verify", file_url) == ({"steps": 600, "bytes": size}, 600)
    counts, whole = last("replicate", file_url, f"file://{tmp_path}/copy")
    assert (counts["objects"], whole) == (600, 600)
    assert last("fork", file_url, f"file://{tmp_path}/fork", "--until", 512) == ({"steps": 512}, 512)
    other = f"file://{tmp_path}/other"  # which nobody holds
    stepfs("init", other, "--slices", SLICES)
    commit(other, range(100))
    stepfs("checkpoint", other, "--group", "g", "--new-group", 80)
    counts, whole = last("reclaim", other, "--grace", 0)
    assert counts["objects"] >= 80
    assert whole is not None
    assert 0.9 < counts["bytes"] / whole < 3  # of steps this small the log is a good part


def test_a_document_has_nothing_beside_it(lake, tmp_path):
    for words in (["verify", lake], ["fork", lake, f"file://{tmp_path}/fork"], ["reclaim", lake]):
        done = stepfs(*words, "--json")
        assert done.document["lake"]
        assert done.err == ""
    with forked.Forked("stepfs", "status", lake, "--watch") as process:
        assert process.stdout.readline().startswith("lake ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err, "\x1b" in out) == (130, "", False)
