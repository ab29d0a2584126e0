"""`stepfs-produce lineage`: which records stand in a step, a file of it, a micro-batch or a token."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer

from stepfs.cli.options import EndpointUrl, Json, PlanDirectory, not_empty, opt
from stepfs.cli.target import is_lake
from stepfs.errors import AbsentError, UsageError
from stepfs.store.api import StoreOptions

_PLACE: Final = re.compile(r"(.*?)(?::([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.DOTALL)


def lineage(
    target: Annotated[
        str,
        typer.Argument(
            metavar="LAKE|PATH[:MICRO[:TOKEN]]",
            help="A lake, a step of a mount, or a file there: all of it, one of its micro-batches, or a token of that.",
            callback=not_empty,
        ),
    ],
    step: Annotated[int | None, opt("--step", "Of a lake; the newest by default.", "N", least=0)] = None,
    rank: Annotated[
        str | None,
        opt(
            "--rank",
            "Of a lake: a data rank, one of its micro-batches, or a token; by default the whole step.",
            "R[:MICRO[:TOKEN]]",
        ),
    ] = None,
    text: Annotated[bool, opt("--text", "Show the records, where their files are at hand and the same.")] = False,
    plan_dir: PlanDirectory = ".",
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show which records stand in a step: source, file, record, epoch and tokens of each.

    Reads the spans in the files themselves, and the lake's list of each source's files. The other way round, from a
    record to its steps: `find`.
    """
    from stepfs_producer.cli.plans.lineage_report import Asked, lineage_report, place_of
    from stepfs_producer.run.history.lineage import Wanted

    options = StoreOptions(endpoint_url)
    if is_lake(target):
        whose, micro, token = _parted(rank or "")
        if whose and not whose.isdigit():
            raise UsageError(f"--rank {rank!r}: write a rank, and if need be micro-batch and token: 3 or 3:0:512")
        asked = Asked(target, options, Wanted(step, int(whose) if whose else None, micro, token))
    else:
        for option, given in (("--step", step), ("--rank", rank)):
            if given is not None:
                raise UsageError(f"{option} is for lakes; {target} is a path of a mount")
        path, micro, token = _parted(target)
        asked = place_of(path, options, micro, token)
    printed, why = lineage_report(asked, plan_dir if text else None, as_json=as_json)
    typer.echo(printed)
    if text and why:
        raise AbsentError(why)


def _parted(text: str) -> tuple[str, int | None, int | None]:
    match = _PLACE.fullmatch(text)
    assert match is not None
    return match[1], *(None if number is None else int(number) for number in match.groups()[1:])  # type: ignore[return-value]
