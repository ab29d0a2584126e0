"""Checks before `stepfs mount` starts: options that need each other, and options that cannot take effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from stepfs.cli.columns import size_text
from stepfs.cli.failure import say
from stepfs.errors import UsageError

if TYPE_CHECKING:
    from stepfs.mount.options import MountOptions


def warn_of_memory(options: MountOptions) -> None:
    """Warn of a budget that the kernel will not grant: the daemon would be killed once the memory is used."""
    from stepfs.data.memory.available import read_memory

    asked = options.memory_bytes or (None if options.cache_dir else options.cache_bytes)
    limit = read_memory().limit
    if asked is not None and asked > limit:
        say(
            f"stepfs: --memory-size of {size_text(asked)} is more than this machine or its cgroup has"
            f" ({size_text(limit)}): once it is used the daemon is killed"
        )


def check_watching(options: MountOptions) -> None:
    """Check that the options belong together; warn of a directory that does not exist: a typo, or not made yet."""
    from stepfs.checkpoints.formats import Place

    if options.checkpoint_dir is None:
        if options.next_step != "N":
            raise UsageError(
                "--next-step needs --checkpoint-dir: where are the checkpoints that it is about?"
            )
        return
    if options.group is None:
        raise UsageError("--checkpoint-dir needs --group: whose checkpoints are these?")
    place = Place.parse(options.checkpoint_dir)
    if not place.directory.is_dir():
        typer.echo(
            f"checkpoint directory {place.directory} does not exist (yet): nothing is recorded until it does",
            err=True,
        )
