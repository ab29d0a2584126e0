"""`stepfs verify`: read everything back; exit 5 if anything that is still read differs from the commits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, printable, size_text
from stepfs.cli.failure import explain, say
from stepfs.cli.live import Job, Mark, progress
from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory
from stepfs.cli.target import lake_of, opened_store, origin_stores
from stepfs.errors import CorruptError, NewerFormatError, StepfsError, UsageError, leaves
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.format.identity import LakeIdentity
    from stepfs.lake.log.reader import LogReader
    from stepfs.lake.origins import OriginStores
    from stepfs.lake.verify.data import Damage, Verification
    from stepfs.store.api import Store


def verify(
    target: LakeOrDirectory,
    check_payload: Annotated[
        bool, Opt("--check-payload", "Check too that each slice begins like a file of its extension.")
    ] = False,
    repair: Annotated[
        bool,
        Opt(
            "--repair",
            "First write a sound control record after one that is damaged, if that is the newest, and put log versions "
            "back that commits carry. Stop reclaims before.",
        ),
    ] = False,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Read everything back and check it.

    Every object of the lake must be present and checksum-correct; the exit code is 5 if one is not, unless it is a
    control record that nobody reads any more. The output names the object, and the command that goes around it.
    """
    from stepfs.lake.identity import open_lake
    from stepfs.lake.verify.repair import repair_control, repair_log

    lake, options = lake_of(target, StoreOptions(endpoint_url))

    async def look() -> tuple[Verification, list[str], bool, str | None]:
        async with opened_store(lake, options) as store, origin_stores(store, options) as origins:
            if repair:
                identity = await open_lake(store)
                done = await repair_control(store, identity, origins)
                say(printable(done or "the newest control record is sound: nothing to repair"))
                for line in await repair_log(store, identity):
                    say(printable(line))
            return await _verify(store, origins, lake, job, content=check_payload)

    with progress("verify", lake, quiet=as_json) as job:
        result, lines, is_sound, lake_id = interruption.run(look)
    if as_json:
        errors = [asdict(damage) for damage in result.errors]
        found = {
            "lake": redact_url(lake),
            "lake_id": lake_id,
            "steps": result.steps,
            "slices": result.slices,
            "bytes": result.payload_bytes,
        }
        typer.echo(json_text({**found, "errors": errors, "advice": lines}))
    else:
        for damage in result.errors:
            say(printable(_damage_line(damage)))
        for line in lines:
            say(f"to do: {printable(line)}")
        size = size_text(result.payload_bytes)
        typer.echo(f"{result.steps} steps, {result.slices} slices, {size}: {len(result.errors)} errors")
    if not is_sound:
        raise typer.Exit(CorruptError.exit_code)


async def _verify(
    store: Store, origins: OriginStores, lake: str, job: Job, *, content: bool
) -> tuple[Verification, list[str], bool, str | None]:
    """The damage, lines with remedies, whether every object that is still read is sound, and the lake's id."""
    from stepfs.lake.control import Control
    from stepfs.lake.identity import open_lake
    from stepfs.lake.log.reader import LogReader
    from stepfs.lake.verify.data import Damage, Verification, advice, from_home, is_superseded, verify_lake
    from stepfs.lake.verify.metadata import verify_metadata

    result, found = Verification(), []
    identity: LakeIdentity | None = None
    log: LogReader | None = None
    try:
        identity = await open_lake(store)
        ext = _checkable(identity.ext) if content else ""
        found = await verify_metadata(store, identity)
        log = await LogReader.open(store, identity)
        result = await verify_lake(log, origins=origins, progress=_advance(job, log), content=ext)
    except (StepfsError, ExceptionGroup) as error:
        code, line = explain(error)
        is_newer = any(isinstance(leaf, NewerFormatError) for leaf in leaves(error))
        if is_newer or (code != CorruptError.exit_code and not found):
            raise
        # An unreadable object is this command's finding, not its failure.
        if not any(damage.key in line for damage in found):
            result.damaged(Damage(None, None, "", line))
    result.errors[:0] = found
    lake_id = None if identity is None else identity.lake_id
    if not result.errors:
        return result, [], True, lake_id
    opens, control_reads, has_beginning = log is not None, True, log is not None
    if identity is not None:
        with suppress(StepfsError):
            control_reads = await _ends_well(Control(store, identity).refresh(), CorruptError)
            if log is None:  # a fork could begin from some state although the head is unreachable
                begun = LogReader.open(store, identity, until_damage=True)
                has_beginning = await _ends_well(begun, StepfsError)
    live = range(0) if log is None else range(log.first_live_step, log.state.next_step)
    lines = from_home(lake, identity, result.errors) + advice(
        lake, lake_id, result.errors, opens=opens, has_beginning=has_beginning, live=live, control_reads=control_reads
    )
    return result, lines, control_reads and all(is_superseded(lake_id, damage) for damage in result.errors), lake_id


async def _ends_well(work: Awaitable[object], failure: type[StepfsError]) -> bool:
    try:
        await work
    except failure:
        return False
    return True


def _checkable(ext: str) -> str:
    """`ext`; `UsageError` if nothing tells such a file from other bytes."""
    from stepfs.format.identity import is_checkable

    if not is_checkable(ext):
        raise UsageError(f"--check-payload: nothing tells a {ext} file from other bytes; verify without it")
    return ext


def _damage_line(damage: Damage) -> str:
    where = [] if damage.step is None else [f"step {damage.step}"]
    where += [] if damage.slice is None else [f"slice {damage.slice}"]
    where += [damage.key] if damage.key else []
    return ": ".join([*([", ".join(where)] if where else []), damage.problem])


def _advance(job: Job, log: LogReader) -> Callable[[Verification], None]:
    live = log.state.next_step - log.first_live_step

    def advance(result: Verification) -> None:
        notes = [f"{len(result.errors)} errors, the newest: {_damage_line(result.errors[-1])}"] if result.errors else []
        job.update(Mark({"steps": result.steps, "bytes": result.payload_bytes}, live, notes))

    return advance
