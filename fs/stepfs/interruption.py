"""Ctrl-C while a command is still loading ends it like any program: by the signal, without output.

Python would raise KeyboardInterrupt in the middle of some import and print a traceback. `stepfs.cli.failure.reported`
takes over once the command's own code runs: then there may be something to clean up. This module imports nothing slow.
"""

from __future__ import annotations

import signal

_silent = False


def end_silently() -> None:
    """Until `listen`, SIGINT ends this process. Not if it is ignored (`nohup`, `&` in a script)."""
    global _silent  # noqa: PLW0603 (the signal's handler is the process's, too)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _silent = True


def listen() -> None:
    """KeyboardInterrupt again, if `end_silently` took it away."""
    global _silent  # noqa: PLW0603
    if _silent:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _silent = False
