"""Arguments and options that several commands share: one spelling, one help text, one environment variable each.

The variable of option `--some-name` is always `STEPFS_SOME_NAME`; a test checks that for every command. A LAKE is
recognised by its scheme (`file://`, `s3://`); an argument without a scheme is a directory.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stepfs.declared_option import variable


def opt(  # typer's own return type is Any, too
    flag: str,
    text: str,
    metavar: str | None = None,
    *,
    short: str | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """The option `--some-name` with its help `text`, and its variable."""
    flags = [flag, short] if short else [flag]
    return typer.Option(*flags, envvar=variable(flag), metavar=metavar, help=text, min=least, max=most)


def not_empty(name: str | None) -> str | None:
    """An empty word, such as a variable that is not set, is no path: it would be the current directory."""
    if name == "":
        raise typer.BadParameter("the name is empty; name a lake by its URL, or a path")
    return name


Lake = Annotated[
    str,
    typer.Argument(metavar="LAKE", help="URL of the lake: file:///dir or s3://bucket/prefix.", callback=not_empty),
]
LakeOrDirectory = Annotated[
    str,
    typer.Argument(metavar="LAKE|DIR", help="URL of a lake, or directory it is mounted on.", callback=not_empty),
]
# A string: typer stats a `Path`, and a mount that hangs would hang the command.
Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="The mount point: an empty directory.", callback=not_empty)
]
EndpointUrl = Annotated[
    str | None,
    opt(
        "--endpoint-url",
        "S3-compatible server to use instead of what the AWS settings say (AWS_ENDPOINT_URL_S3, profile).",
        "URL",
    ),
]
Json = Annotated[bool, opt("--json", "Print one JSON document.")]
PlanDirectory = Annotated[
    str,
    opt(
        "--plan-dir",
        "Where the plan's file was: relative names in it are below, and modules of yours.",
        "DIR",
    ),
]
