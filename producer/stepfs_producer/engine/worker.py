"""How a worker process begins, and the modules that it loads before its first task.

A worker imports this module, so nothing here may need trio: that costs half of its start.

A worker must not outlive a command that was killed with -9. PR_SET_PDEATHSIG does not serve: the kernel sends it when
the *thread* that started the process ends, and trio starts processes in threads that end after some idle seconds.
So each worker waits on a pidfd of the command in a thread of its own.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final, TypeAlias

from stepfs_producer.engine.shared_memory import BodyArgument, body_of, parts_of

Buffer: TypeAlias = bytes | memoryview  # or any other buffer that a store maps
_STDERR: Final = 2
_PIPE_BYTES: Final = 1 << 20  # the most that a user without rights gets


def begin(parent: int) -> bool:
    """Begin a new worker: leave signals from the terminal to the command, and end when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are shared by processes already
    try:
        command = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)
    _widen_pipes()
    threading.Thread(target=_end_with, args=(command,), name="ends with the command", daemon=True).start()
    return True


def begin_in_ray(preload: Callable[[], object]) -> None:
    """Begin a new worker that Ray started: where the plan's directory travels with the run, it is the current one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    here = Path.cwd()
    sys.path[:] = [path for path in sys.path if Path(path) != here]  # installed modules go first
    preload()


def carried_out(
    task: bytes, bodies: Sequence[Sequence[Buffer]] = (), *, keep: bool = False
) -> tuple[bytes, list[memoryview]]:
    """A pickled (function, arguments) → pickled (True, result), or (False, exception); and the parts of a body.

    `bodies`: of the arguments that are `BodyArgument`. `keep`: the function returns (head, body), and (head, bytes of the body)
    stands for the result.
    """
    try:
        function, arguments = pickle.loads(task)  # noqa: S301 - of the command
        found = [
            body_of([memoryview(part) for part in bodies[one.number]]) if isinstance(one, BodyArgument) else one
            for one in arguments
        ]
        result = function(*found)
        if not keep:
            return pickle.dumps((True, result)), []
        head, body = result
        parts = parts_of(body)
        return pickle.dumps((True, (head, sum(part.nbytes for part in parts)))), parts
    except BaseException as error:  # noqa: BLE001 - it is raised where the task was submitted
        return _failed(error), []


def _failed(error: BaseException) -> bytes:
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)  # noqa: S301 - some classes of exceptions fail only here
    except Exception:  # noqa: BLE001
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return answer


def preload(directory: str, modules: Sequence[str] = ()) -> None:
    """Prepare a new worker: import the modules of tasks, and find the user's beside the plan; `modules` are the plan's own.

    Slow imports would make a first task late.
    """
    import stepfs_producer.payloads.files  # noqa: PLC0415
    import stepfs_producer.sources.reading  # noqa: PLC0415
    import stepfs_producer.transforms.records  # noqa: F401, PLC0415

    find_modules_in(directory)
    for name in modules:
        with suppress(Exception, SystemExit):  # its first task names the error
            import_module(name)


def find_modules_in(directory: str) -> None:
    """Let `module:function` name modules in this directory; installed ones go first."""
    path = str(Path(directory or ".").resolve())
    if path not in sys.path:
        sys.path.append(path)


def _widen_pipes() -> None:
    """Every time a pipe is full costs both sides a turn, and a step is megabytes; by default pipes hold 64 KiB."""
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # the listing's own; or this user's share of memory for pipes is used up
            if number > _STDERR and stat.S_ISFIFO(os.fstat(number).st_mode):
                fcntl.fcntl(number, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _end_with(command: int) -> None:
    select.select([command], [], [])
    os.kill(os.getpid(), signal.SIGKILL)
