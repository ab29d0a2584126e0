"""The end of a daemon by an error: it is said to the log and to the keeper, which decides what it means for the mount."""

from __future__ import annotations

import logging
import os
from typing import Final, NoReturn

from stepfs.errors import StepfsError, leaves, severity
from stepfs.follow.follower import ReplacedError
from stepfs.mount.daemon.keeper_socket import Tie

_log = logging.getLogger("stepfs.mount")

_LINE_MAX: Final = 8192


def report(tie: Tie, error: BaseException) -> int:
    """Say why this daemon ends; returns its exit code."""
    code, line, expected = explain(error)
    first = tie.spec.get("foreground") and tie.start.get("how") == "first" and tie.mount is None
    if not (expected and first):  # else the keeper prints it
        _log.error("%s", line, exc_info=None if expected else error)
    how = "refused" if ends_the_mount(error) else "failed"
    tie.say("ended", how=how, line=line[:_LINE_MAX], code=code, announced=expected)
    return code


def die(tie: Tie, error: BaseException) -> NoReturn:
    """End at once: the requests that are under way are sent to the next daemon, and get no error from this one."""
    code = report(tie, error)
    logging.shutdown()
    os._exit(code or 1)


def ends_the_mount(error: BaseException) -> bool:
    """Whether the lake is another one by now: nobody can serve this mount any more."""
    return any(isinstance(leaf, ReplacedError) for leaf in leaves(error))


def explain(error: BaseException) -> tuple[int, str, bool]:
    """(exit code, one line, whether it is an expected error) of the exception that ended a session."""
    known = [leaf for leaf in leaves(error) if isinstance(leaf, StepfsError)]
    if known:
        worst = min(known, key=severity)
        return worst.exit_code, str(worst), True
    leaf = leaves(error)[0]
    return 1, f"unexpected {type(leaf).__name__}: {leaf}", False
