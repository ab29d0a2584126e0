"""The table of `stepfs-produce` commands. They import the library inside their functions, so help is immediate."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs import __version__
from stepfs.cli.failure import reported
from stepfs.cli.variables import warn_of_unknown
from stepfs_producer.cli.check import check
from stepfs_producer.cli.run import run
from stepfs_producer.cli.simulate import simulate
from stepfs_producer.cli.text import text

app = typer.Typer(
    name="stepfs-produce",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 the source is exhausted or the limit reached, 1 failure, 2 usage, 3 absent, 4 refused, 5 corrupt, "
        "6 store unreachable, 7 fenced (do not restart), 130 or 143 stopped by SIGINT or SIGTERM (restart to continue)."
    ),
)
app.command("run")(reported("stepfs-produce")(run))
app.command("check")(reported("stepfs-produce")(check))
app.command("simulate")(reported("stepfs-produce")(simulate))
app.command("text")(reported("stepfs-produce")(text))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepfs-produce {__version__}")
        raise typer.Exit


@app.callback()
def stepfs_produce(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Turn data into global training steps, each in exactly one commit, across kills and restarts."""
    warn_of_unknown()
