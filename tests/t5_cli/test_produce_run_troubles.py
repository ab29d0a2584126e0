"""`stepfs-produce run` whose records or functions are at fault: it says which, and ends with one line."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from forked import Forked, ran

PLAN = """\
version: 1
output: {ext: .npy, mesh: "dp=1", sequence_length: 128, micro_batch_tokens: 512}
sources:
  chats: {format: jsonl, files: chats/, transform: "my_chats:render"}
mix: {chats: 1}
"""


def run(directory: Path, render: str) -> subprocess.CompletedProcess[str]:
    return ran("stepfs_producer", words_of(directory, render))


def words_of(directory: Path, render: str) -> list[str]:
    (directory / "chats").mkdir()
    lines = [json.dumps({"text": f"chat {number}"}) + "\n" for number in range(60)]
    (directory / "chats" / "a.jsonl").write_text("".join(lines))
    (directory / "my_chats.py").write_text(f"import os, sys\n\ndef render(record):\n    {render}\n")
    (directory / "plan.yaml").write_text(PLAN)
    plan, lake = str(directory / "plan.yaml"), f"file://{directory}/lake"
    return ["run", plan, lake, "--workers", "1", "--limit-steps", "2"]


@pytest.mark.nightly
def test_a_record_that_kills_its_workers_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "if record['text'] == 'chat 37': os.abort()\n    return record['text']")
    assert done.returncode == 1
    offset = sum(len(json.dumps({"text": f"chat {number}"})) + 1 for number in range(37))
    assert f"source chats: every worker dies of the record at {offset} of 0/a.jsonl (record " in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.nightly
def test_a_function_that_ends_its_process_is_told_apart_from_a_bad_record(tmp_path: Path) -> None:
    done = run(tmp_path, "sys.exit(3)")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
    assert "my_chats:render ended its process (SystemExit: 3)" in done.stderr


def test_the_record_that_stops_a_plan_is_named_with_its_reason(tmp_path: Path) -> None:
    done = run(tmp_path, "return record['text'] if record['text'] != 'chat 5' else object()")
    assert done.returncode == 4
    assert "bad record: source chats, 0/a.jsonl at 95: my_chats:render returned " in done.stderr
    assert "source chats: too many records could not be decoded" in done.stderr


def test_two_interrupts_end_a_run_whose_function_does_not_return(tmp_path: Path) -> None:
    began = tmp_path / "began"
    words = words_of(tmp_path, f"open({str(began)!r}, 'w').close()\n    while True: pass")
    with Forked("stepfs_producer", *words) as process:
        while not began.exists():
            assert process.poll() is None
            time.sleep(0.02)  # looking without a pause takes the core that the command needs
        process.send_signal(signal.SIGINT)
        assert "stopping" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
