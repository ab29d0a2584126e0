"""The table of `stepfs` commands: a command is one module of `commands` and one line below.

Command modules import the library inside their functions, so that `stepfs --help` and shell completion load neither
boto3 nor pyfuse3 nor trio. The help is plain text instead of typer's boxes: it works in a pipe, and rich loads only
when a command draws a progress bar.
"""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs import __version__
from stepfs.cli.commands import (
    checkpoint,
    doctor,
    fork,
    init,
    ls,
    mount,
    reclaim,
    retire_producer,
    seal,
    show,
    stats,
    status,
    verify,
    version,
)
from stepfs.cli.failure import reported
from stepfs.cli.variables import warn_of_unknown

app = typer.Typer(
    name="stepfs",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 done, 1 failure, 2 usage, 3 absent, 4 refused or busy, 5 corrupt, 6 store unreachable, "
        "7 fenced (do not restart)."
    ),
)

for name, command, summary in (
    ("init", init.init, "Create a lake."),
    ("mount", mount.mount, "Mount a lake on a directory."),
    ("unmount", mount.unmount, "Unmount, and wait until nothing is left."),
    ("ls", ls.ls, "List the steps of a lake as a mount would."),
    ("show", show.show, "Show the arrays of a payload."),
    ("stats", stats.stats, "Show what was committed, by producer and hour."),
    ("status", status.status, "Show the state of a lake or of a mount."),
    ("checkpoint", checkpoint.checkpoint, "Record that a checkpoint exists."),
    ("reclaim", reclaim.reclaim, "Delete the steps that no checkpoint needs."),
    ("retire-producer", retire_producer.retire_producer, "Give up a producer that will not come back."),
    ("seal", seal.seal, "Declare a lake complete."),
    ("fork", fork.fork, "Start a new lake from a step of another."),
    ("verify", verify.verify, "Read everything back and check it."),
    ("doctor", doctor.doctor, "Find out why it does not work here."),
    ("version", version.version, "Show the versions of everything that matters here."),
):
    app.command(name, short_help=summary)(reported()(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stepfs {__version__}")
        raise typer.Exit


@app.callback()
def stepfs(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Global training steps, committed to object storage, read as files."""
    warn_of_unknown()
