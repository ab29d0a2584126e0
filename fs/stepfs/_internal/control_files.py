"""The one reader of a mount's `.stepfs/` from outside, and the guard for every access to a mount point.

A mount whose daemon hangs, or was killed at the wrong moment, never answers. So no command and no trainer's helper
touches a mount point in its own thread: it uses a thread that can be abandoned, for a bounded time.
"""

import ctypes
import errno
import json
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from stepfs.errors import AbsentError, RefusedError, StepfsError, command

ANSWER_S: Final = 5.0
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})
_DAEMON_GONE: Final = frozenset({errno.ENOTCONN, errno.ECONNABORTED})

# The numbers of setresuid and setresgid: the C library's functions change all threads.
_SET_IDS: Final = {"x86_64": (117, 119), "aarch64": (147, 149)}

Identity = tuple[int, int]  # user id, group id
T = TypeVar("T")
_turns: Final[dict[str, threading.Lock]] = {}  # by the device of a mount


def answer_within(
    look: Callable[[], T], timeout_s: float | None = None, *, asked_as: Identity | None = None, device: str = ""
) -> T | OSError | None:
    """The result of `look`, or its OSError; None if it takes longer than `timeout_s` (`ANSWER_S`).

    Only root may look with another user's rights. Of those with one `device` one looks at a time, in this process: a mount
    that is silent for good costs it one thread.
    """
    timeout_s = ANSWER_S if timeout_s is None else timeout_s
    until = time.monotonic() + timeout_s
    turn = _turns.setdefault(device, threading.Lock()) if device else threading.Lock()
    if not turn.acquire(timeout=timeout_s):
        return None
    result: list[T | OSError] = []

    def run() -> None:
        try:
            if asked_as is not None:
                _take_rights_in_this_thread(*asked_as)
            result.append(look())
        except OSError as error:
            result.append(error)
        finally:
            turn.release()

    # A thread that hangs in a dead file system is abandoned: it is a daemon thread and can be killed.
    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started now
        turn.release()
        raise
    thread.join(max(0.0, until - time.monotonic()))
    return result[0] if result else None


def _take_rights_in_this_thread(user: int, group: int) -> None:
    """It cannot be undone. A thread on a machine of another kind keeps its own rights. OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_user, set_group = _SET_IDS.get(platform.machine(), (0, 0))
    for number, wanted in ((set_group, group), (set_user, user)):
        if number and libc.syscall(number, wanted, wanted, wanted) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def read_control_file(directory: Path, name: str, *, asked_as: Identity | None = None) -> str:
    """The text of `.stepfs/<name>` of the mount at `directory`.

    `AbsentError` if `directory` is not a stepfs mount, `RefusedError` if it is another user's, `StepfsError` if its daemon
    is gone or does not answer.
    """
    answer = answer_within((directory / ".stepfs" / name).read_text, asked_as=asked_as)
    if isinstance(answer, (FileNotFoundError, NotADirectoryError)):
        what = "is not a stepfs mount" if answer_within(directory.is_dir) is True else "does not exist"
        raise AbsentError(
            f"{directory} {what}; mount a lake there with `{command('stepfs', 'mount', 'LAKE', directory)}`, or name the lake's URL instead"
        )
    if answer is None:
        raise StepfsError(
            f"{directory}: the mount does not answer within {ANSWER_S:g} s; `{command('stepfs', 'doctor', directory)}` names its log"
        )
    if isinstance(answer, OSError):
        if answer.errno in _DAEMON_GONE:
            raise StepfsError(
                f"{directory}: the mount's daemon is gone; `stepfs mount` there again clears it, or"
                f" `{command('stepfs', 'unmount', directory)}`"
            )
        kind = RefusedError if answer.errno in _FORBIDDEN else StepfsError
        raise kind(f"{directory}: the mount cannot be read ({answer.strerror}); ask the user who mounted it")
    return answer


def read_status(directory: Path) -> dict[str, object]:
    """`.stepfs/status.json`; errors as `read_control_file`."""
    return _document(directory, "status.json")


def read_config(directory: Path, *, asked_as: Identity | None = None) -> dict[str, object]:
    """`.stepfs/config.json`; errors as `read_control_file`."""
    return _document(directory, "config.json", asked_as)


def _document(directory: Path, name: str, asked_as: Identity | None = None) -> dict[str, object]:
    try:
        document = json.loads(read_control_file(directory, name, asked_as=asked_as))
    except ValueError as error:
        raise StepfsError(f"{directory}: .stepfs/{name} is not JSON ({error}); is this a stepfs mount?") from error
    if not isinstance(document, dict):
        raise StepfsError(f"{directory}: .stepfs/{name} is not a map; is this a stepfs mount?")
    return document
