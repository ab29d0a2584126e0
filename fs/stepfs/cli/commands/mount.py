"""`stepfs mount`: the options that `MountOptions` declares; `stepfs.mount` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stepfs.cli.declared_options import takes
from stepfs.cli.mount_checks import check_watching, warn_of_memory
from stepfs.cli.options import Directory, Lake, opt
from stepfs.mount.options import MountOptions


@takes(MountOptions)
def mount(
    lake: Lake,
    directory: Directory,
    *,
    foreground: Annotated[
        bool,
        opt(
            "--foreground/--daemon",
            "Serve in this process, or in the background and return once the mount answers.",
        ),
    ] = False,
    values: dict[str, Any],
) -> None:
    """Mount a lake on a directory: one directory per committed step, one read-only file per rank."""
    from stepfs.mount.host.mountinfo import real_directory

    options = MountOptions(lake, real_directory(Path(directory)), **values)
    check_watching(options)
    warn_of_memory(options)
    if foreground:
        import signal

        from stepfs.cli.failure import EXIT_INTERRUPTED
        from stepfs.mount import logs
        from stepfs.mount.session import run

        logs.configure(options.directory)
        if run(options) == signal.SIGINT:
            raise typer.Exit(EXIT_INTERRUPTED)
    else:
        from stepfs.cli.failure import announce
        from stepfs.mount.daemon import start

        start(options, announce)
