"""`stepfs mount`: the options that `MountOptions` declares; `stepfs.mount` does the work."""

from pathlib import Path
from typing import Annotated, Any

import typer

from stepfs._internal.control_files import answer_within, read_config
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, size_text
from stepfs.cli.failure import announce, log_as_json, say
from stepfs.cli.options import Directory, Json, Lake
from stepfs.cli.target import check_order
from stepfs.errors import RefusedError, UsageError
from stepfs.mount.options import MountOptions


def mount(
    context: typer.Context,
    lake: Lake,
    directory: Directory,
    *,
    foreground: Annotated[
        bool,
        Opt("--foreground/--daemon", "Stay in the foreground, or in the background and return once the mount answers."),
    ] = False,
    replace: Annotated[
        bool,
        Opt("--replace", "Have another daemon take the mount over, under its readers; mount if there is none."),
    ] = False,
    no_group: Annotated[bool, Opt("--no-group", "With --replace: for no run any more.")] = False,
    as_json: Json = False,
    values: Annotated[dict[str, Any], MountOptions],
) -> None:
    """Mount a lake on a directory: one directory per committed step, one read-only file per rank."""
    from stepfs.mount.host.mount_table import real_directory
    from stepfs.mount.launch import serve_in_foreground, start

    check_order(lake, directory, "stepfs", "mount", directory, lake)
    if as_json and foreground:
        raise UsageError("--json is said once the mount answers, in the background; leave out --foreground, or --json")
    given = {name for name in values if _is_given(context, name)}
    if no_group:
        if not replace or "group" in given:
            raise UsageError("--no-group goes with --replace, and not with --group")
        given |= {"group", "checkpoint_dir", "next_step"}
        values |= {"group": None, "checkpoint_dir": None, "next_step": "N"}
    values["wait_s"] = values["wait_s"] or None
    options = MountOptions(lake, real_directory(Path(directory)), **values)
    if foreground and options.log_format == "json":
        log_as_json()
    warn_of_memory(options)
    if foreground:
        serve_in_foreground(options, replace=replace, given=given, check=check_watching)
    for line in start(options, announce, replace=replace, given=given, check=check_watching):
        announce(f"{directory}: {line}")
    if as_json:
        config: Any = read_config(options.directory)
        facts = {name: config[name] for name in ("lake", "lake_id", "directory", "pid")}
        typer.echo(json_text(facts, indent=None))


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name in {"COMMANDLINE", "ENVIRONMENT"}


def warn_of_memory(options: MountOptions) -> None:
    """Warn of a budget that the kernel will not grant: the daemon would be killed once the memory is used."""
    from stepfs._internal.limits import read_memory

    asked = options.memory_bytes
    limit = read_memory().limit
    if asked is not None and asked > limit:
        say(
            f"stepfs: --memory of {size_text(asked)} is more than this machine or its cgroup has"
            f" ({size_text(limit)}): once it is used the daemon is killed"
        )


def check_watching(options: MountOptions) -> None:
    """Check that the options belong together; warn of a directory that does not exist: a typo, or not made yet."""
    from stepfs.checkpoints.formats import Place

    if options.checkpoint_dir is None:
        if options.next_step != "N":
            raise UsageError("--next-step needs --checkpoint-dir: where are the checkpoints that it is about?")
        return
    if options.group is None:
        raise UsageError("--checkpoint-dir needs --group: whose checkpoints are these?")
    place = Place.parse(options.checkpoint_dir)
    there = answer_within(place.directory.is_dir)
    if there is None:
        raise RefusedError(f"checkpoint directory {place.directory} does not answer; name another, or try again")
    if there is not True:
        say(f"checkpoint directory {place.directory} does not exist (yet): nothing is recorded until it does")
