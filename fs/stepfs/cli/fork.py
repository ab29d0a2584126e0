"""`stepfs fork`: a new lake around a bad stretch of another."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from stepfs.cli.options import EndpointUrl
from stepfs.errors import UsageError

if TYPE_CHECKING:
    from stepfs.format.fork_marker import Cut

_POINT = re.compile(r"(.+://.+)@([0-9]{1,15})")
_SKIP = re.compile(r"([0-9]{1,15}):([0-9]{0,15})")


def fork(
    point: Annotated[
        str, typer.Argument(metavar="LAKE@STEP", help="The parent, and where to leave its history.")
    ],
    new: Annotated[str, typer.Argument(metavar="NEW", help="URL of the new lake.")],
    skip: Annotated[
        str | None,
        typer.Option(
            "--skip",
            envvar="STEPFS_SKIP",
            metavar="A:B",
            help="Leave out steps A to B - 1; `STEP:` leaves out all that follow.",
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Create a lake with the parent's steps before STEP, then those from STEP on outside A:B, renumbered.

    It shares the parent's data, which its group in the parent keeps alive; nothing is copied.
    """
    import trio

    match = _POINT.fullmatch(point)
    if match is None:
        raise UsageError(f"{point!r}: write the parent as LAKE@STEP, such as s3://bucket/run@1200")
    trio.run(_fork, match[1], new, _cut(int(match[2]), skip), endpoint_url)


def _cut(step: int, skip: str | None) -> Cut:
    from stepfs.format.fork_marker import Cut
    from stepfs.format.ids import INTEGER_MAX, Step

    if skip is None:
        return Cut(Step(step), Step(step), Step(step))
    match = _SKIP.fullmatch(skip)
    if match is None:
        raise UsageError(f"--skip {skip!r}: write A:B (B is not included), or A: for all that follow")
    return Cut(Step(step), Step(int(match[1])), Step(int(match[2]) if match[2] else INTEGER_MAX))


async def _fork(parent_url: str, new_url: str, cut: Cut, endpoint_url: str | None) -> None:
    from stepfs.cli.target import opened_log, opened_store
    from stepfs.clock import SystemClock
    from stepfs.fork import fork as make_fork

    async with opened_log(parent_url, endpoint_url) as parent, opened_store(new_url, endpoint_url) as store:
        identity = await make_fork(parent, store, cut, SystemClock())
    typer.echo(f"created lake {identity.lake_id} at {new_url}, a fork of {parent_url} at step {cut.step}")
