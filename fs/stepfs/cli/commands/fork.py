"""`stepfs fork`: a new lake around a bad stretch of another, or up to the damage of a damaged one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, printable
from stepfs.cli.live import Mark, progress
from stepfs.cli.options import EndpointUrl, Json
from stepfs.cli.target import opened_store
from stepfs.errors import UsageError
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.format.identity import LakeIdentity
    from stepfs.lake.fork import Cut, UnreachableCommits
    from stepfs.lake.log.reader import LogReader

_SKIP = re.compile(r"([0-9]{1,15}):([0-9]{0,15})")


def fork(
    lake: Annotated[str, typer.Argument(metavar="LAKE", help="URL of the parent.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="URL of the new lake.")],
    skip: Annotated[
        str | None, Opt("--skip", "Leave out steps A to B - 1; `STEP:` leaves out all that follow.", "A:B")
    ] = None,
    until: Annotated[
        int | None,
        Opt("--until", "Leave out this step and all after it; no producer makes them again.", "STEP", least=0),
    ] = None,
    rewind: Annotated[
        bool, Opt("--rewind", "With --until: producers go back to STEP, too, and make the steps from there on again.")
    ] = False,
    until_damage: Annotated[
        bool, Opt("--until-damage", "Of a lake whose log cannot be read to its end, take all steps before the damage.")
    ] = False,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Create a lake with ALL steps of the parent, except those that --skip or --until leave out.

    `stepfs fork LAKE NEW --until 20` keeps steps 0 to 19. Steps behind a left-out stretch are renumbered. The new lake
    shares the parent's data, which its group in the parent keeps alive; nothing is copied. A fork that was killed keeps its
    group there: the next one to NEW names it.
    """
    from stepfs._internal.clock import SystemClock
    from stepfs.lake import fork as forks
    from stepfs.lake.fork import left_out
    from stepfs.lake.identity import open_lake
    from stepfs.lake.log.reader import LogReader

    if rewind and (until is None or skip is not None or until_damage):
        raise UsageError("--rewind goes with --until alone")
    skipped, options = _skipped(skip), StoreOptions(endpoint_url)

    def note(steps: int, whole: int) -> None:
        job.update(Mark({"steps": steps}, whole))

    async def make() -> tuple[LogReader, Cut, LakeIdentity, int, UnreachableCommits | None]:
        async with opened_store(lake, options) as above, opened_store(new, options) as store:
            parent = await LogReader.open(above, await open_lake(above), until_damage=until_damage)
            cut = _cut(parent, skipped, until)
            identity = await forks.fork(parent, store, cut, SystemClock(), rewind=rewind, note=note)
            count = sum(map(len, forks.parent_steps(cut, parent.first_live_step, parent.state.next_step)))
            rest = await left_out(parent) if parent.damage is not None else None
            return parent, cut, identity, count, rest

    with progress("fork", lake, quiet=as_json) as job:
        parent, cut, identity, count, rest = interruption.run(make)
    if as_json:
        lakes = {"lake": redact_url(new), "lake_id": identity.lake_id, "parent": redact_url(lake)}
        typer.echo(_document(lakes, parent, cut, count, rest))
        return
    typer.echo(f"created lake {identity.lake_id} at {new}, a fork of {lake}, with {count} steps")
    if until is not None:
        typer.echo(
            f"producers go back to step {until}, and make the steps from there on again"
            if rewind
            else "producers stand behind what was left out: they never make it again (with --rewind they do)"
        )
    if until_damage:
        _tell_damage(parent, rest)


def _skipped(skip: str | None) -> tuple[int, int | None] | None:
    """--skip A:B as (A, B), B None for all that follow."""
    if skip is None:
        return None
    match = _SKIP.fullmatch(skip)
    if match is None:
        raise UsageError(f"--skip {skip!r}: write A:B (B is not included), or A: for all that follow")
    return int(match[1]), int(match[2]) if match[2] else None


def _cut(parent: LogReader, skip: tuple[int, int | None] | None, until: int | None) -> Cut:
    from stepfs.format.ids import Step
    from stepfs.lake.fork import NO_END, Cut

    end = NO_END if until is None else Step(until)
    # It leaves out nothing before the first step that an option names.
    step = min(n for n in (skip and skip[0], until, parent.state.next_step) if n is not None)
    first, last = skip or (step, step)
    return Cut(Step(step), Step(first), NO_END if last is None else Step(last), end)


def _document(lakes: dict[str, str], parent: LogReader, cut: Cut, count: int, rest: UnreachableCommits | None) -> str:
    left = None
    if parent.damage is not None and rest is not None:
        left = {
            "version": parent.damage.version,
            "why": parent.damage.why,
            "commits": rest.commits,
            "first_step": parent.state.next_step,
            "next_step": rest.next_step,
            "next_seqs": dict(sorted(rest.next_seqs.items())),
        }
    steps = {"parent_id": parent.identity.lake_id, "step": cut.step, "steps": count}
    return json_text({**lakes, **steps, "left_out": left})


def _tell_damage(parent: LogReader, rest: UnreachableCommits | None) -> None:
    if parent.damage is None or rest is None:
        typer.echo("the parent's log is whole: nothing was left out because of damage")
        return
    first, end = parent.state.next_step, rest.next_step
    steps = f"steps {first} to {end - 1}" if end > first else "what they held"
    version = parent.damage.version
    typer.echo(
        f"left out: {rest.commits} commits from log version {version} on, and with them {steps} as far as can be "
        f"read ({printable(parent.damage.why)})"
    )
    typer.echo(
        f"producers stand where version {version - 1} left them: started on the new lake, they produce again what came after"
    )
    for name, seq in sorted(rest.next_seqs.items()):
        known = parent.state.producers.get(name)
        typer.echo(f"  {printable(name)}: from batch {known.next_seq if known else 0}, had committed {seq}")
