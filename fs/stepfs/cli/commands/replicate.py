"""`stepfs replicate`: the same lake in a second store, copied once or followed."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, size_text
from stepfs.cli.failure import is_a_log, say
from stepfs.cli.live import Job, Mark, print_above, progress
from stepfs.cli.options import EndpointUrl, Json, Lake, not_empty
from stepfs.cli.target import opened_store
from stepfs.errors import StepfsError, StoreUnreachableError, command
from stepfs.format.arguments import parse_interval, parse_size
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepfs.lake.replicate import Copier, Replica
    from stepfs.store.api import Store

_AGAIN_S: Final = 1.0  # after an outage
_SHOW_S: Final = 60.0  # between lines of one that goes on
_Every = Annotated[
    float | None,
    Opt(
        "--every", "Go on, and look for new steps this often, such as 250ms.", "DURATION", parse_interval, environ=True
    ),
]


def replicate(
    home: Lake,
    copy: Annotated[
        str, typer.Argument(metavar="COPY", help="URL of the replica, in another store.", callback=not_empty)
    ],
    every: _Every = None,
    first: Annotated[
        int | None, Opt("--from", "A new replica begins at this step, or at the head.", "STEP", least=0)
    ] = None,
    keep_all: Annotated[
        bool, Opt("--keep-all", "An archive: COPY gives up no step, and LAKE none before it is copied.")
    ] = False,
    check: Annotated[
        bool, Opt("--check", "First read all that COPY has, and put again what is not as the log says.")
    ] = False,
    memory: Annotated[
        int, Opt("--memory", "For objects on their way.", "SIZE", parse=parse_size, given="1G", environ=True)
    ] = 1 << 30,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Copy a lake to another store, and with --every all that is committed to it from now on.

    COPY can be mounted and verified at any time; what it has given up is decided there, by `stepfs reclaim COPY`. Safe to
    kill at any moment. If LAKE is lost for good, its producers go on in a fork: `stepfs fork COPY NEW`.
    """
    import trio

    from stepfs.format.ids import Step
    from stepfs.lake.replicate import Copier, Replica

    options = StoreOptions(endpoint_url)

    async def work(job: Job) -> Replica:
        async with opened_store(home, options) as source, opened_store(copy, options.for_origin()) as store:
            end = None if every is not None or as_json else await _next_step(source)
            copier, replica = Copier(source, store, memory, _noted(job, end)), None
            more, show_at_s, complain_at_s, checks = False, float("-inf"), float("-inf"), check
            while True:
                try:
                    replica = replica or await Replica.open(
                        copier, first=None if first is None else Step(first), keeps_all=keep_all, check=checks
                    )
                    checks = False
                    more = await replica.round()
                    if every is None and not more:
                        await replica.look()
                        return replica
                except StoreUnreachableError as error:
                    if every is None:
                        raise
                    if trio.current_time() >= complain_at_s:
                        say(f"stepfs: {error}; trying again, and a line a minute")
                        complain_at_s = trio.current_time() + _SHOW_S
                    replica, more, show_at_s = None, False, float("-inf")
                else:
                    complain_at_s = float("-inf")
                if every is not None and replica is not None and trio.current_time() >= show_at_s:
                    _show(replica, as_json=as_json)
                    show_at_s = trio.current_time() + _SHOW_S
                if not more:
                    await trio.sleep(_AGAIN_S if replica is None else every or 0)

    # One that goes on has a line a minute of its own for logs.
    with progress("replicate", home, quiet=as_json or (every is not None and is_a_log())) as job:
        replica = interruption.run(work, job)
    _show(replica, as_json=as_json, is_last=True)


async def _next_step(home: Store) -> int | None:
    """Where the lake ends, for the time that is left; what is wrong with it is said by the copy."""
    from stepfs.lake.identity import open_lake
    from stepfs.lake.log.reader import LogReader

    with suppress(StepfsError):
        return (await LogReader.open(home, await open_lake(home), reads_only=True)).state.next_step
    return None


def _noted(job: Job, end: int | None) -> Callable[[Copier, int], None]:
    newest = -1

    def note(copier: Copier, step: int) -> None:
        nonlocal newest
        newest = max(newest, step)
        counts = {"objects": copier.copied, "bytes": copier.copied_bytes}
        whole = None if end is None else copier.copied + max(0, end - 1 - newest)
        job.update(Mark(counts, whole, [f"copied up to step {newest}"], f"up to step {newest}"))

    return note


def _show(replica: Replica, *, as_json: bool, is_last: bool = False) -> None:
    copier, state, first = replica.copier, replica.log.state, replica.log.first_live_step
    home, copy = copier.home.url, copier.store.url
    if as_json:
        steps = {"head": state.version, "digest": state.digest.hex(), "first_step": first, "next_step": state.next_step}
        copied = {"objects": copier.copied, "bytes": copier.copied_bytes}
        facts = {"lake_id": state.lake_id, "home": home, "copy": copy, **steps, "copied": copied}
        print_above(json_text(facts, indent=None))
        return
    span = f"steps {first} to {state.next_step - 1} of {home}" if state.next_step > first else f"no step of {home} yet"
    print_above(f"{copy} has {span}; copied {copier.copied} objects ({size_text(copier.copied_bytes)})")
    if is_last and (hold := replica.hold) is not None:
        retire = command("stepfs", "retire-group", home, hold.name)
        print_above(f"until this runs again, {home} keeps what is needed at {copy} now; to end that: {retire}")
