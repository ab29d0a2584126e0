"""What an interpreter does around a program, for a process that was forked from an interpreter that is loaded."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence


def begin(arguments: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
    """As if it had been started so. Descriptors are the caller's business."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [*arguments]


def run(program: Callable[[], object]) -> int:
    """The program's exit code, after all that an interpreter does at its end. What the program returns is no code."""
    code = 0
    try:
        program()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter does at its edge
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code
