"""Every way a command can fail: one line, the documented exit code, no traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import trio
import typer

from stepfs import errors
from stepfs.cli.failure import explain, reported


def fail_with(error: BaseException, program: str = "stepfs") -> int:
    with pytest.raises(SystemExit) as caught, reported(program):
        raise error
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    ("kind", "code"), [
        (errors.StepfsError, 1), (errors.UsageError, 2), (errors.AbsentError, 3), (errors.RefusedError, 4),
        (errors.SealedError, 4), (errors.CorruptError, 5), (errors.StoreUnreachableError, 6),
        (errors.FencedError, 7),
    ],
)  # fmt: skip
def test_each_class_has_its_documented_exit_code(kind, code, capsys):
    assert fail_with(kind("do this instead")) == code
    assert capsys.readouterr() == ("", "stepfs: do this instead\n")


def test_a_message_of_several_lines_keeps_them_and_nothing_else_that_a_terminal_obeys(capsys):
    class ListedError(errors.UsageError):
        several_lines = True

    assert fail_with(ListedError("two mistakes:\none\x1b[31m\ntwo")) == 2
    assert capsys.readouterr().err == "stepfs: two mistakes:\none?[31m\ntwo\n"


def test_a_message_of_one_line_stays_one_whatever_it_quotes(capsys):
    fail_with(errors.UsageError("'a\nstepfs: all is well': no such file"))
    assert capsys.readouterr().err == "stepfs: 'a?stepfs: all is well': no such file\n"


def test_the_program_names_itself(capsys):
    fail_with(errors.UsageError("no"), program="stepfs-produce")
    assert capsys.readouterr().err == "stepfs-produce: no\n"


@pytest.mark.parametrize("module", ["stepfs", "stepfs_producer"])
def test_a_wrong_call_of_a_module_names_the_program_and_the_help_that_is_there(module):
    done = subprocess.run([sys.executable, "-m", module, "--foo"], check=False, capture_output=True, text=True)
    program = {"stepfs": "stepfs", "stepfs_producer": "stepfs-produce"}[module]
    assert (done.returncode, done.stderr) == (2, f"{program}: No such option: --foo; see `python -m {module} --help`\n")


def test_success_passes_through():
    with reported():
        pass


def test_as_a_decorator_it_keeps_the_signature_typer_reads():
    @reported()
    def command(lake: str, count: int = 3) -> None:
        """What it does."""
        raise errors.AbsentError(f"{lake}{count}")

    assert command.__name__ == "command"
    assert command.__annotations__["lake"] == "str"
    with pytest.raises(SystemExit) as caught:
        command("x")
    assert caught.value.code == 3


def test_a_nursery_does_not_hide_the_error(capsys):
    async def child() -> None:
        raise errors.CorruptError("log/3: checksum mismatch")

    async def parent() -> None:
        async with trio.open_nursery() as outer, trio.open_nursery() as inner:
            inner.start_soon(child)
            outer.start_soon(trio.sleep_forever)

    with pytest.raises(SystemExit) as caught, reported():
        trio.run(parent)
    assert caught.value.code == 5
    assert capsys.readouterr().err == "stepfs: log/3: checksum mismatch\n"


def test_of_several_errors_the_most_severe_decides():
    group = ExceptionGroup(
        "nursery",
        [
            errors.StoreUnreachableError("later"),
            ExceptionGroup("inner", [ValueError("x"), errors.FencedError("stop")]),
            errors.CorruptError("bad"),
        ],
    )
    assert explain(group) == (7, "stop")


def test_interrupt_is_quiet_even_inside_groups(capsys):
    assert fail_with(KeyboardInterrupt()) == 130
    assert fail_with(BaseExceptionGroup("n", [KeyboardInterrupt(), ValueError("x")])) == 130
    of_a_class = RuntimeError("Error calling __set_name__")  # by Python 3.11, while modules are imported
    of_a_class.__cause__ = KeyboardInterrupt()
    assert fail_with(of_a_class) == 130
    assert capsys.readouterr() == ("", "")


def test_control_flow_of_typer_is_left_alone():
    with pytest.raises(typer.Exit) as caught, reported():
        raise typer.Exit(9)
    assert caught.value.exit_code == 9
    with pytest.raises(SystemExit) as ended, reported():
        raise SystemExit(8)
    assert ended.value.code == 8


def test_os_errors_name_the_file_and_the_reason(capsys):
    assert fail_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/cache/x")) == 1
    assert capsys.readouterr().err == "stepfs: /var/cache/x: No space left on device\n"


def test_a_bug_is_one_line_and_says_how_to_see_more(capsys, monkeypatch):
    monkeypatch.delenv("STEPFS_DEBUG", raising=False)
    assert fail_with(ValueError("first\nsecond")) == 1
    err = capsys.readouterr().err
    assert err == "stepfs: unexpected ValueError: first second (run again with STEPFS_DEBUG=1 for the traceback)\n"
    monkeypatch.setenv("STEPFS_DEBUG", "1")
    assert fail_with(ValueError("first")) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly():
    script = "from stepfs.cli.failure import reported\nwith reported():\n    print('x' * 1_000_000)\n"
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, check=False, timeout=30
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_under_stdout_is_reported():
    script = "from stepfs.cli.failure import reported\nwith reported():\n    print('x')\n"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False, timeout=30
        )
    assert done.returncode == 1
    assert b"stepfs: No space left on device" in done.stderr


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", ">&-", "2>&1 >&- <&-"])
def test_a_stream_that_takes_nothing_leaves_the_exit_code(redirection):
    script = (
        "import logging; from stepfs import errors; from stepfs.cli import failure\n"
        "failure.open_standard_streams(); failure.log_to_stderr()\n"
        "with failure.reported():\n"
        "    print('x'); logging.getLogger('stepfs').warning('y')\n"
        "    raise errors.FencedError('z')\n"
    )
    done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, script], check=False)
    assert done.returncode == 7


def test_a_mount_in_a_container_says_all_in_json(tmp_path):
    options = ["--foreground", "--log-format", "json", "--group", "g", "--checkpoint-dir", tmp_path / "none"]
    done = forked.ran("stepfs", ["mount", "file:///nowhere", tmp_path, *options])
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, [line["level"] for line in lines]) == (3, ["INFO", "ERROR"])
    assert "does not exist (yet)" in lines[0]["message"]


def test_closed_streams_are_not_the_next_file_that_is_opened(tmp_path):
    script = (
        "import os, sys; from stepfs.cli.failure import open_standard_streams, reported\n"
        "open_standard_streams()\n"
        f"with reported(), open({str(tmp_path / 'data')!r}, 'w') as file:\n"
        "    assert file.fileno() > 2\n"
        "    print('to nobody'); os.write(1, b'to nobody'); os.write(2, b'to nobody')\n"
    )
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" <&- >&- 2>&-', sys.executable, script], check=False, timeout=30)
    assert done.returncode == 0
    assert (tmp_path / "data").read_bytes() == b""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_terminal_without_a_letter_shows_another_and_a_path_its_bytes(encoding):
    """`stepfs doctor` prints an arrow; a path may be bytes of no encoding."""
    code = "from stepfs.cli.failure import open_standard_streams as o; o(); print('\\u2192 m\\udcff')"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, env={**os.environ, "PYTHONIOENCODING": encoding}
    )
    arrow = "→".encode() if encoding == "utf-8" else b"?"
    assert (done.returncode, done.stdout, done.stderr) == (0, arrow + b" m\xff\n", b"")
