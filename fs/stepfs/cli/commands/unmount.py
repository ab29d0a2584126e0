"""`stepfs unmount`, and the checkpoint that may come with it."""

from pathlib import Path
from typing import Annotated

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text
from stepfs.cli.options import Directory, Json
from stepfs.cli.target import is_lake, opened_log
from stepfs.errors import RefusedError, StepfsError, UsageError, command
from stepfs.store.api import StoreOptions


def unmount(
    directory: Directory,
    *,
    checkpoint: Annotated[
        int | None,
        Opt(
            "--checkpoint",
            "Record, for the mount's group, a durable checkpoint that resumes at step NEXT.",
            "NEXT",
            least=0,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Unmount, and return when the daemon is gone and its cache removed. A busy mount is left as it is (exit 4)."""
    from stepfs.mount.unmount import unmount_and_wait

    if is_lake(directory):
        raise UsageError(
            f"{directory} is a lake; name the directory that it is mounted on, as `stepfs doctor` lists it"
        )
    if checkpoint is None:
        unmount_and_wait(Path(directory))
    else:
        _with_checkpoint(directory, checkpoint)
    if as_json:
        typer.echo(json_text({"directory": directory, "checkpoint": checkpoint}, indent=None))


def _with_checkpoint(directory: str, checkpoint: int) -> None:
    from stepfs.checkpoints.record import check_next_step, check_on_mount, record_checkpoint
    from stepfs.mount.host.mount_table import real_directory
    from stepfs.mount.unmount import unmount_and_wait
    from stepfs.view.mounted import mounted_lake

    where = real_directory(Path(directory))
    mounted = mounted_lake(where)
    if mounted.group is None:
        raise RefusedError(f"{directory} was mounted without --group; there is no run to record a checkpoint for")
    check_next_step(checkpoint, check_on_mount(checkpoint, where))  # report a wrong step while the mount stands
    unmount_and_wait(Path(directory))
    group, options = mounted.group, StoreOptions(mounted.endpoint_url)

    async def record() -> None:
        async with opened_log(mounted.lake, options) as log:
            await record_checkpoint(log.control, log.state.next_step, group, checkpoint)

    try:
        interruption.run(record)
    except StepfsError as error:
        by_hand = command("stepfs", "checkpoint", mounted.lake, "--group", group, checkpoint)
        raise type(error)(
            f"{directory} is unmounted, but its checkpoint is not recorded ({error}); do it with `{by_hand}`"
        ) from error
