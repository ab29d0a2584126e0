"""Commands in processes of their own that begin with everything imported: a server forks them, in place of new interpreters."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Self

PATIENCE_S = 100.0
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["forked_loaded"])


@cache
def start_server() -> None:
    """It finds our own modules by a variable alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


class Handed:
    """A descriptor that goes along to the process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return _taken, (reduction.DupFd(self.number),)


def _taken(duplicate: Any) -> int:
    return int(duplicate.detach())


def stand_still(module: str, owner: str, name: str) -> None:
    """In place of a function: a thread in a file system, or in a server's library, that does not answer."""

    def stuck(*_: object, **__: object) -> None:
        os.write(2, b"stands\n")
        time.sleep(3600)

    holder = import_module(module)
    setattr(getattr(holder, owner) if owner else holder, name, stuck)


def fails_while(flag: str, module: str, owner: str, name: str) -> None:
    """A method of a store cannot reach it for as long as there is a file `flag`."""
    from stepfs.errors import StoreUnreachableError  # noqa: PLC0415

    holder = getattr(import_module(module), owner)
    sound = getattr(holder, name)

    def is_away() -> bool:
        return Path(flag).exists()

    async def method(*arguments: object, **named: object) -> object:
        if is_away():
            raise StoreUnreachableError("the store does not answer")
        return await sound(*arguments, **named)

    setattr(holder, name, method)


def one_core() -> None:
    """A run that is not told how many starts one worker."""
    import_module("stepfs_producer.run.machines").usable_cpus = lambda: 1  # type: ignore[attr-defined]


def begun(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process that calls it."""
    start_server()
    process = CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def take_over(environment: dict[str, str], directory: str, stdout: int, stderr: int) -> None:
    """In a process that was forked: what a new interpreter has from the one that starts it."""
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)  # new ones: those of the server remember what its own can do
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _know(address: str) -> None:
    """In a process that was forked: workers of a run are forked by the same server."""
    server = getattr(forkserver, "_forkserver")  # noqa: B009 (no name of it is public)
    server._forkserver_address, server.ensure_running = address, lambda: None
    import_module("forkedworkers").fork_workers()


def _begin(
    package: str,
    words: list[str],
    environment: dict[str, str],
    directory: str,
    stdout: int,
    stderr: int,
    first: Callable[[], object] | None,
    server: str,
) -> None:
    take_over(environment, directory, stdout, stderr)
    if package == "stepfs_producer":
        _know(server)
    if "TESTS_CONSTANTS" in environment:
        runpy.run_path(str(Path(__file__).parent / "changed_constants/sitecustomize.py"))
    if first is not None:
        first()
    if words[:1] == ["mount"]:
        import_module("forkeddaemon").fork_daemons(environment)
    sys.argv = [package, *words]
    if package == "stepfs":
        from stepfs.cli import main  # noqa: PLC0415
    else:
        from stepfs_producer.cli import main  # noqa: PLC0415
    main()


class Forked:
    """A command that runs: of `subprocess.Popen` what tests of commands need."""

    def __init__(
        self,
        package: str,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        first: Callable[[], object] | None = None,
        terminal: int | None = None,
    ) -> None:
        """`first`: what it calls before the command; `terminal`: its stderr, in place of a pipe."""
        start_server()
        out, err = os.pipe(), os.pipe()
        variables = dict(os.environ if env is None else env)
        if "reclaim" not in words[:1]:  # a command that does not know a variable asks all others: 0.1 s of CPU
            variables.pop("STEPFS_GRACE", None)
        arguments = (package, [str(word) for word in words], variables)
        descriptors = Handed(out[1]), Handed(err[1] if terminal is None else terminal)
        address = getattr(forkserver, "_forkserver")._forkserver_address  # noqa: B009 (no public name)
        self._process = CONTEXT.Process(
            target=_begin, args=(*arguments, str(cwd or Path.cwd()), *descriptors, first, address)
        )
        self._process.start()
        for _, end in (out, err):
            os.close(end)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout, self.stderr = (os.fdopen(one[0], errors="surrogateescape") for one in (out, err))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.join()
        self.stdout.close()
        self.stderr.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = PATIENCE_S) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it does not end within {timeout} s"
        return self._process.exitcode

    def communicate(self, timeout: float = PATIENCE_S) -> tuple[str, str]:
        """Both outputs to their ends, and the end of the process; it is killed once the time is over."""
        out: list[str] = []
        reading = threading.Thread(target=lambda: out.append(self.stdout.read()))
        killing = threading.Timer(timeout, self.kill)
        reading.start()
        killing.start()
        err = self.stderr.read()
        reading.join()
        self.wait(timeout)
        killing.cancel()
        self.stdout.close()
        self.stderr.close()
        return out[0], err


def ran(
    package: str, words: Sequence[object], *, timeout: float = PATIENCE_S, **options: Any
) -> subprocess.CompletedProcess[str]:
    """How a command ended and what it printed, as `finished.ran` says it."""
    with Forked(package, *words, **options) as process:
        out, err = process.communicate(timeout)
        assert process.returncode is not None
        return subprocess.CompletedProcess([package, *map(str, words)], process.returncode, out, err)
