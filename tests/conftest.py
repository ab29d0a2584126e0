"""What every layer of the tests shares: lakes on real stores, and the rule that no warning goes unnoticed."""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudservers
import nightly
import pytest
import servers
import trio
from cloudservers import CloudServer
from faultproxy import FaultProxy
from hypothesis import given, settings
from hypothesis import strategies as st
from ownmounts import enter_own_mount_namespace
from stubs3 import StubS3, stub_s3
from trio.testing import MockClock

_CI = bool(os.environ.get("CI"))

os.environ["STEPFS_GRACE"] = "0"  # a reclaim in a test deletes at once, unless the test is about second chances

# torch's threads wait for each other in loops, which the tests beside them pay.
os.environ["OMP_NUM_THREADS"] = "1"

# A script that runs the tests with `&` has SIGINT ignored, here and in every process the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The examples of a push are few, and CI's the same ones every time; at night many are new."""
    short = "not nightly" in config.getoption("markexpr")
    examples = {"derandomize": _CI, "max_examples": 30} if short else {"max_examples": 300}
    settings.register_profile("stepfs", deadline=None, print_blob=True, **examples)
    settings.load_profile("stepfs")
    enter_own_mount_namespace()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What imports made is here to stay, a million objects: collections need not look at it each time."""
    if session.config.option.collectonly:
        _any_text()
    gc.collect()
    gc.freeze()


@settings(max_examples=1, database=None)
@given(st.text())
def _any_text(_: str) -> None:
    """What Hypothesis learns of a new checkout it keeps: 3 s of CPU for each process that is not the first."""


class _Unannounced(logging.Handler):
    def __init__(self, patterns: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.patterns = [re.compile(pattern) for pattern in patterns]
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not any(pattern.search(message) for pattern in self.patterns):
            self.messages.append(f"{record.name}: {record.levelname}: {message}")


@pytest.fixture(autouse=True)
def expected_log_warnings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that logged a warning it did not announce with `@pytest.mark.logs("regex")`."""
    patterns = [str(pattern) for mark in request.node.iter_markers("logs") for pattern in mark.args]
    handler = _Unannounced(patterns)
    roots = [logging.getLogger("stepfs"), logging.getLogger("stepfs_producer")]
    for root in roots:
        root.addHandler(handler)
    yield
    for root in roots:
        root.removeHandler(handler)
    assert not handler.messages, f"unannounced log messages: {handler.messages}"


@pytest.fixture
def patient_clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Virtual time that jumps when nothing is left to do, and stands still while a worker thread is at work.

    `autojump_clock` would jump over every deadline while a thread looks at the disk, however short that takes.
    """
    clock = MockClock(autojump_threshold=0)
    run_sync, working = trio.to_thread.run_sync, 0

    async def waited_for(*args: Any, **options: Any) -> Any:
        nonlocal working
        working += 1
        clock.autojump_threshold = math.inf
        try:
            return await run_sync(*args, **options)
        finally:
            working -= 1
            clock.autojump_threshold = math.inf if working else 0

    monkeypatch.setattr(trio.to_thread, "run_sync", waited_for)
    return clock


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    """A SeaweedFS for the whole session; the process's AWS_* variables point at it and at nothing else."""
    with (
        servers.chosen(tmp_path_factory.mktemp("seaweed", numbered=True)) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in server.environment().items():
            patch.setenv(name, value)
        yield server
        server.kill()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Server]:
    """`rclone serve s3`, the server that lies; pass its `endpoint_url` explicitly."""
    with servers.rclone_s3(tmp_path_factory.mktemp("rclone", numbered=True)) as server:
        yield server
        server.kill()


def _cloud(server: AbstractContextManager[CloudServer]) -> Iterator[CloudServer]:
    with server as running, pytest.MonkeyPatch.context() as patch:
        variables = running.environment()
        foreign = {name.partition("_")[0] for name in variables}
        for name in [name for name in os.environ if name.partition("_")[0] in foreign]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudServer]:
    """The double of Google's XML interface; the process's GOOGLE_* variables point at it."""
    yield from _cloud(cloudservers.google(tmp_path_factory.mktemp("google", numbered=True)))


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudServer]:
    """Azurite; the process's AZURE_* variables point at it."""
    nightly.needs("Azurite", there=cloudservers.AZURITE.exists())
    yield from _cloud(cloudservers.azurite(tmp_path_factory.mktemp("azurite", numbered=True)))


@pytest.fixture
def gs_url(google: CloudServer) -> str:
    """A prefix nothing was written under, on the double."""
    return f"{google.home}/{secrets.token_hex(8)}"


@pytest.fixture
def az_url(azurite: CloudServer) -> str:
    """A prefix nothing was written under, on Azurite."""
    return f"{azurite.home}/{secrets.token_hex(8)}"


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubS3]:
    """An S3 server that answers what the test tells it to; pass its `endpoint_url` explicitly."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with stub_s3() as server:
        yield server


@pytest.fixture
async def fault_proxy(seaweed: servers.S3Server) -> AsyncIterator[FaultProxy]:
    """A proxy in front of SeaweedFS that loses what a test tells it to; pass its `endpoint_url` explicitly."""
    proxy = FaultProxy(seaweed.plain_port, certificate=seaweed.certificate)
    async with trio.open_nursery() as nursery:
        await nursery.start(proxy.serve)
        yield proxy
        nursery.cancel_scope.cancel()


@pytest.fixture
def s3_url(seaweed: servers.S3Server) -> str:
    """A prefix nothing was written under, on SeaweedFS."""
    return f"s3://{servers.BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """A directory that does not exist yet."""
    return (tmp_path / "lake").as_uri()


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.nightly)])
def lake_url(request: pytest.FixtureRequest) -> str:
    """Both kinds of real store, one after the other; that they are alike is their contract, and in each push."""
    return str(request.getfixturevalue(f"{request.param}_url"))
