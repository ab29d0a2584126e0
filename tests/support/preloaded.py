"""Python programs without the seconds that importing torch takes: forked from one process that has imported it.

Each program runs in a process of its own, as `python PROGRAM ARGUMENT…` would, and may be killed.

As a program: the server. It gets one JSON document a line: `{"run": …}` answers with a pid, `{"wait": pid}` with an exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Preloaded:
    """A process that has run some import statements, and forks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._running: set[int] = set()

    def start(self, *command: object, output: Path, env: Mapping[str, str] | None = None) -> int:
        """Start a program; returns its pid. `output` gets what it prints and what it says on stderr."""
        run = {"run": [str(word) for word in command], "env": dict(env or {}), "output": str(output)}
        pid = self._ask(run)
        self._running.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        """The exit code of a program that was started here, once it has ended; minus the signal that killed it."""
        code = self._ask({"wait": pid})
        self._running.discard(pid)
        return code

    def kill(self) -> None:
        """End the programs that nobody has waited for; the server may be waiting for one of them."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _ask(self, question: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


@contextmanager
def preloaded(imports: str, env: Mapping[str, str]) -> Iterator[Preloaded]:
    """A server that has run `imports`. Ends with the block, as do the programs that still run."""
    process = subprocess.Popen(
        [sys.executable, __file__, imports],
        env={**os.environ, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # leaving it closes the server's input, which ends it
        programs = Preloaded(process)
        try:
            yield programs
        finally:
            programs.kill()


def _serve(imports: str) -> None:
    exec(imports, {})
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                _become(asked)
        with suppress(BrokenPipeError):
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()


def _become(asked: dict[str, Any]) -> None:
    code = 1
    try:
        output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, number)
        os.environ.update(asked["env"])
        sys.argv = asked["run"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001 - a child that returned would serve as well
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
