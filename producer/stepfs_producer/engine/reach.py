"""Reaching a Ray cluster: all of it that needs no import of ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Final, TypeVar

import trio

from stepfs.errors import RefusedError, StepfsError, UsageError

T = TypeVar("T")
CONNECT_S: Final = 10.0


class ClusterUnreachableError(StepfsError):
    """The machines that should work do not answer. Start them, or name others."""

    exit_code = 6


def refusal_of(error: Exception, address: str) -> StepfsError:
    """An error of `ray.init` as one of ours."""
    text = f"{error} {error.__cause__ or ''}"
    if "Version mismatch" in text:
        facts = " ".join(text.partition("Version mismatch:")[2].split())
        return RefusedError(f"Ray at {address} is of another version: {facts}; install the cluster's versions here")
    if "exceeds the maximum size" in text:
        return RefusedError(
            "the plan's directory is too large for Ray to send it to every node; give the plan, its modules and its tokenizer "
            "a directory of their own"
        )
    if "oken" in text and "uthenti" in text:
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
