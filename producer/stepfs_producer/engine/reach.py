"""Reaching a Ray cluster, or one of our own; all of it that needs no import of ray."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

import trio

from stepfs.errors import RefusedError, StepfsError, UsageError
from stepfs_producer.engine.api import ClusterUnreachableError, spares_of

T = TypeVar("T")
CONNECT_S: Final = 10.0
_STORE_BYTES_MIN: Final = 80 << 20  # Ray takes no less
_REAPER: Final = """\
import os, shutil, signal, sys, time
sys.stdin.read()  # to the end of the command
mine = b"RAY_AUTH_TOKEN=" + os.environb[b"RAY_AUTH_TOKEN"]
clean = 0
# For 2 s: while a program is loaded, its environment reads as empty. For a minute, where the directory cannot be removed.
while clean < 40 or (clean < 1200 and os.path.exists(sys.argv[1])):
    clean += 1
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mine in file.read().split(b"\\0") and int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
                    clean = 0
        except OSError:
            pass
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    time.sleep(0.05)
"""


def options_of_init(workers: int, store_bytes: int, *, own: bool) -> dict[str, object]:
    """Of `ray.init`. `own`: for a Ray of our own, with CPUs for so many workers and memory for bodies under way."""
    options: dict[str, object] = {
        "log_to_driver": False,
        "logging_level": logging.CRITICAL,
        "configure_logging": False,
    }
    if own:
        options |= {
            "num_cpus": workers + spares_of(workers),
            "object_store_memory": max(store_bytes, _STORE_BYTES_MIN),
            "include_dashboard": False,
        }
    return options


def refusal_of(error: Exception, address: str | None) -> StepfsError:
    """An error of `ray.init` as one of ours."""
    if isinstance(error, StepfsError):
        return error
    if address is None:
        return RefusedError(f"Ray could not be started on this machine: {line_of(error)}")
    said = f"{error} {error.__cause__ or ''}"
    if "Version mismatch" in said:
        facts = " ".join(said.partition("Version mismatch:")[2].split())
        return RefusedError(f"Ray at {address} is of another version: {facts}; install the cluster's versions here")
    if "oken" in said and "uthenti" in said:
        return RefusedError(
            f"Ray at {address} asks for another token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH"
        )
    return ClusterUnreachableError(
        f"Ray at {address} does not answer as a cluster that this machine is a node of: {line_of(error)}; run `ray start "
        f"--address={address}` here first, or start the command on a node"
    )


async def refuse_unreachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise UsageError(
            f"--ray-address {address}: write auto, or HOST:PORT of the head node's GCS, such as 10.0.0.4:6379"
        )
    try:
        with trio.fail_after(CONNECT_S):
            await (await trio.open_tcp_stream(host, int(port))).aclose()
    except (OSError, trio.TooSlowError) as error:
        raise ClusterUnreachableError(
            f"Ray at {address} cannot be reached: {line_of(error) or 'no answer'}; start it, or name another --ray-address"
        ) from error


@asynccontextmanager
async def in_a_thread(life: AbstractContextManager[None]) -> AsyncIterator[None]:
    """Within `life`, which a thread enters and leaves that lives as long: the kernel kills a Ray with the thread that started
    it. Cancelled while it enters, the thread is left alone.
    """
    token = trio.lowlevel.current_trio_token()
    up, down = trio.Event(), trio.Event()
    end = threading.Event()
    failed: list[Exception] = []

    def tell(event: trio.Event) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(event.set)

    def live() -> None:
        try:
            with life:
                tell(up)
                end.wait()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)
            tell(up)
        finally:
            tell(down)

    threading.Thread(target=live, name="ray", daemon=True).start()
    try:
        await up.wait()
        if failed:
            raise failed[0]
        if threading.current_thread() is threading.main_thread():
            # Ray's handler would abort 3 s after the signal.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        yield
    finally:
        end.set()
        with trio.CancelScope(shield=up.is_set()):
            await down.wait()


async def outcome_of(future: Future[T]) -> T:
    """Its result, set in any thread. Cancelling leaves it alone."""
    token = trio.lowlevel.current_trio_token()
    done = trio.Event()

    def tell(_future: object) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    future.add_done_callback(tell)
    await done.wait()
    return future.result()


@contextmanager
def of_our_own() -> Iterator[str]:
    """Around the life of a Ray, with a directory for it: other users of this machine are kept out, and nothing of it stays.

    Its processes are known by the token in their environment, however the command ends: two agents would else stay for a
    minute, and the directory for ever. The home directory gets no token.
    """
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "SPT_NOENV")}
    # Whether it is asked for is Ray's to choose, or the user's.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(16)
    os.environ["SPT_NOENV"] = "1"  # setproctitle, which Ray's processes call, would else write over their environment
    with TemporaryDirectory(prefix="stepfs-ray-", ignore_cleanup_errors=True) as directory:
        reaper = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-I", "-S", "-c", _REAPER, directory],
            stdin=subprocess.PIPE,
            start_new_session=True,  # signals of the terminal are the command's
        )
        try:
            yield directory
        finally:
            with reaper:
                reaper.kill()
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextmanager
def quiet() -> Iterator[None]:
    """Ray's native part writes to stderr at any level; all that counts is raised as well."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def line_of(error: BaseException) -> str:
    """An error as the end of a line. Where Ray puts a remote traceback into it, its last line says why."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (lines[-1] if "ray::" in lines[0] else lines[0]).strip()[:300]
