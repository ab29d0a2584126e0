"""How a command fails: one line of advice on stderr and the documented exit code, never a traceback.

Every command of both programs runs inside `reported()`. `STEPFS_DEBUG=1` prints the traceback, too. Exit codes beyond
`stepfs.errors`: 1 anything else, 130 interrupted, 141 the reader of our output went away (as a shell reports SIGPIPE).
"""

import codecs
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Final, TextIO

import typer

from stepfs._internal.interruption import listen
from stepfs.cli.columns import json_text, printable
from stepfs.errors import StepfsError, leaves, severity

EXIT_FAILURE: Final = 1
EXIT_INTERRUPTED: Final = 130
EXIT_PIPE: Final = 141
_running = "stepfs"
_as_json: logging.Formatter | None = None
_documents = False  # stdout is for a program that reads JSON
_ANY: Final = "stepfs.printed"  # an error handler of codecs
_STDOUT: Final = 1
_STDERR: Final = 2
_CONTROL_FLOW: Final = (typer.Exit, typer.Abort, typer.BadParameter)


@contextmanager
def reported(program: str = "stepfs") -> Iterator[None]:
    """Turn any exception into its line on stderr and `SystemExit(code)`. Use as decorator or context manager."""
    global _running, _as_json, _documents
    _running, _as_json, _documents = program, None, False
    try:
        listen()
        yield
        sys.stdout.flush()  # here, where a full disk or a closed pipe can still be reported
    except _CONTROL_FLOW:
        raise
    except Exception as error:  # noqa: BLE001 — the edge: every exception becomes one line
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 makes it an error where a class is defined
            raise SystemExit(EXIT_INTERRUPTED) from None
        code, line = explain(error)
        _say(program, error, code, line)
        raise SystemExit(code) from None
    except BaseException as error:
        if not any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):  # maybe in a nursery's group
            raise
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _discard(sys.stderr)


def open_standard_streams() -> None:
    """Open closed descriptors 0 to 2 on /dev/null: otherwise the next opened file would get their number.

    Paths that are not UTF-8 are printed as the bytes they are, and letters that the terminal does not have as "?".
    """
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:  # closed: the lowest number that is free
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            if number == _STDOUT:
                sys.stdout = os.fdopen(number, "w", closefd=False)
            elif number == _STDERR:
                sys.stderr = os.fdopen(number, "w", closefd=False)
    codecs.register_error(_ANY, _any_bytes)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors=_ANY)


def _any_bytes(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return b"".join(
        bytes([ord(each) - 0xDC00]) if "\udc80" <= each <= "\udcff" else b"?" for each in letters
    ), error.end


def log_to_stderr() -> None:
    """Log the library's warnings to stderr; all its messages under `STEPFS_DEBUG=1`. Call it once per process."""
    logging.basicConfig(stream=sys.stderr, format="%(name)s: %(levelname)s: %(message)s")
    level = logging.DEBUG if os.environ.get("STEPFS_DEBUG") == "1" else logging.WARNING
    logging.getLogger("stepfs").setLevel(level)


def expect_document(expected: bool) -> None:
    """Whether stdout still owes a JSON document: then an error is one, too."""
    global _documents  # noqa: PLW0603
    _documents = expected


def print_document(line: str, code: int) -> None:
    """An error on stdout, in place of the document that it prevents."""
    with suppress(OSError):
        typer.echo(json_text({"error": line, "exit_code": code}, indent=None))
        sys.stdout.flush()


def log_as_json() -> None:
    """Make each line on stderr a JSON object from now on, as in the log of a mount."""
    from stepfs.mount.logs import Json

    global _as_json  # noqa: PLW0603
    _as_json = Json()
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
            handler.setFormatter(_as_json)


def is_a_log(stream: TextIO | None = None) -> bool:
    """Whether a stream, of itself stderr, is read line by line, so that nothing may be drawn there."""
    terminal = (stream or sys.stderr).isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}
    return _as_json is not None or not terminal


def explain(error: BaseException) -> tuple[int, str]:
    """An exception, or a group of them → (exit code, the line or lines for stderr; empty if no reader is left)."""
    found = leaves(error)
    known = [leaf for leaf in found if isinstance(leaf, StepfsError)]
    if known:
        worst = min(known, key=severity)
        text = str(worst) or type(worst).__name__
        return worst.exit_code, text if worst.several_lines else text.replace("\n", "?")
    unknown = [leaf for leaf in found if not isinstance(leaf, OSError)]
    if unknown:
        first = unknown[0]
        what = f"{type(first).__name__}: {first}" if str(first) else type(first).__name__
        what = " ".join(what.split())
        return EXIT_FAILURE, f"unexpected {what} (run again with STEPFS_DEBUG=1 for the traceback)"
    first_leaf = found[0]
    assert isinstance(first_leaf, OSError)
    if isinstance(first_leaf, BrokenPipeError):
        return EXIT_PIPE, ""
    reason = first_leaf.strerror or str(first_leaf) or type(first_leaf).__name__
    return EXIT_FAILURE, reason if first_leaf.filename is None else f"{first_leaf.filename}: {reason}"


def announce(line: str, level: int = logging.INFO) -> None:
    """Print on stderr, prefixed with the program's name, the reason of the wait."""
    say(line if _as_json else f"{_running}: {line}", level)


def say(line: str, level: int = logging.INFO) -> None:
    """Print a line on stderr if possible: a closed stderr must not change how a program ends. `level` is for JSON."""
    if _as_json is not None:
        line = _as_json.format(logging.LogRecord(_running, level, "", 0, line, None, None))
    with suppress(OSError, RuntimeError):  # RuntimeError: a signal's handler in the middle of another line
        sys.stderr.write(f"{line}\n")


def _say(program: str, error: Exception, code: int, line: str) -> None:
    if os.environ.get("STEPFS_DEBUG") == "1":
        say("".join(traceback.format_exception(error)).rstrip(), logging.DEBUG)
    if line:
        line = "\n".join(map(printable, line.split("\n")))
        say(line if _as_json else f"{program}: {line}", logging.ERROR)
        if _documents:
            print_document(line, code)
    if code == EXIT_PIPE:
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """The interpreter flushes it once more at exit, and an error there would change the exit code."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
