"""Checks of a store and its lake. The full probe writes (and deletes) a few small objects."""

from collections.abc import AsyncIterator

import trio

from stepfs.doctor.machine import Finding, fail, note, ok
from stepfs.errors import AbsentError, StepfsError
from stepfs.format.identity import LakeIdentity
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.lake.origins import OriginStores
from stepfs.store.api import Store
from stepfs.store.local.local_store import LocalStore
from stepfs.store.probe import keeps_versions, probe_store


async def check_lake(store: Store, origins: OriginStores) -> AsyncIterator[Finding]:
    """Check the store, then the identity, then the log; stop where later checks would make no sense."""
    started = trio.current_time()
    identity: LakeIdentity | None = None
    try:
        identity = await open_lake(store)
    except AbsentError as error:
        yield fail("lake", str(error), "or correct the URL", exit_code=error.exit_code)
    except StepfsError as error:
        yield fail("lake", str(error), "correct this first", exit_code=error.exit_code)
        return
    if isinstance(store, LocalStore) and not store.root.exists():
        return  # the probe would create it
    if identity is not None:
        yield ok("lake", f"{identity.lake_id}, {identity.grid} per step, {identity.ext}")
    if profile := getattr(store, "profile", None):
        yield ok("profile", f"[profile {profile}] of the AWS configuration, by the lake's URL")
    yield ok("store", f"answers in {(trio.current_time() - started) * 1000:.1f} ms ({store.url})")
    async for finding in _check_store(store):
        yield finding
    if identity is not None:
        async for finding in _check_log(store, identity, origins):
            yield finding


async def _check_log(store: Store, identity: LakeIdentity, origins: OriginStores) -> AsyncIterator[Finding]:
    try:
        log = await LogReader.open(store, identity)
    except StepfsError as error:
        yield fail("log", str(error), "run `stepfs verify`", exit_code=error.exit_code)
        return
    state = log.state
    if state.next_step == 0:
        yield note("log", "no step is committed yet", "start a producer")
    else:
        yield ok("log", f"version {state.version}, steps {log.first_live_step}…{state.next_step - 1}")
    for line in await origins.problems(state, log.first_live_step):
        yield fail("origin", line, "until then steps of this fork cannot be read")


async def _check_store(store: Store) -> AsyncIterator[Finding]:
    try:
        await probe_store(store, thorough=True)
    except StepfsError as error:
        yield fail(
            "conditional create",
            str(error),
            "commit only to a store that passes; reading an existing lake needs no right to write",
            exit_code=error.exit_code,
        )
    else:
        yield ok("conditional create", "honest, serially and in a race")
    if await keeps_versions(store):
        yield note_versions()


def note_versions() -> Finding:
    return note(
        "versions",
        "the bucket keeps versions: each mount with a group adds up to 2,880 a day, and reclaim frees no space by itself",
        "make sure that a lifecycle rule expires noncurrent versions and expired delete markers (fs/OPERATIONS.md, Stores)",
    )
