"""`stepfs-produce replay`: steps of a lake, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.options import EndpointUrl, Json, Lake, PlanDirectory
from stepfs.declared_option import Opt
from stepfs.store.api import StoreOptions
from stepfs_producer.cli.options import Workers


def replay(
    lake: Lake,
    # Without variables: STEPFS_STEPS and STEPFS_RANKS are what a mount shows, and fetches ahead.
    steps: Annotated[str, typer.Option("--steps", help="Steps A to B-1, by the lake's numbers.", metavar="A:B")],
    compare: Annotated[bool, Opt("--compare", "Compare them with those of the lake; the default.")] = False,
    to: Annotated[Path | None, Opt("--to", "Write them there instead, named as in a mount.", "DIR")] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", help="Make the files of these data ranks only; all are planned.", metavar="R,S-T"),
    ] = None,
    producer_id: Annotated[
        str | None, Opt("--producer-id", "Only the steps of this producer, where several made them.", "ID")
    ] = None,
    plan_dir: PlanDirectory = ".",
    workers: Workers = None,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Make steps of LAKE again, from its plan, its lists of files and the files themselves, and compare every byte.

    Exit code 1 if a step differs; each difference is named, and libraries that are not those of then.
    """
    from stepfs.errors import UsageError
    from stepfs.view.ranks import parse_ranks, parse_steps
    from stepfs_producer.cli.plans.replay_report import replay_and_report
    from stepfs_producer.run.history.replay import ReplayOptions

    if compare and to is not None:
        raise UsageError("--compare and --to are two purposes; give one of them")
    options = ReplayOptions(
        lake,
        parse_steps(steps),
        producer_id=producer_id,
        ranks=None if ranks is None else parse_ranks(ranks),
        to=to,
        directory=plan_dir,
        workers=workers,
    )
    if code := replay_and_report(options, StoreOptions(endpoint_url), as_json=as_json):
        raise typer.Exit(code)
