"""`stepfs mount`: options become a `MountOptions`; `stepfs.mount` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stepfs.cli.mount_checks import check_watching, warn_of_memory
from stepfs.cli.options import Directory, EndpointUrl, Lake


def mount(
    lake: Lake,
    directory: Directory,
    *,
    foreground: Annotated[
        bool,
        typer.Option(
            "--foreground/--daemon",
            envvar="STEPFS_FOREGROUND",
            help="Serve in this process, or in the background and return once the mount answers.",
        ),
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", envvar="STEPFS_RANKS", metavar="0-7", help="Ranks of this node: fetch theirs ahead."
        ),
    ] = None,
    world: Annotated[
        int | None,
        typer.Option(
            "--world", envvar="STEPFS_WORLD", metavar="N", help="Show N ranks, a multiple of the slices."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            envvar="STEPFS_MESH",
            metavar="pp=2,dp=4,tp=2",
            help="Show the ranks of this device mesh, slowest dimension first; dp, fsdp and cp choose the slice.",
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            "--steps",
            envvar="STEPFS_STEPS",
            metavar="A:B",
            help="Show exactly steps A to B-1 from the start; opening one that is not committed yet waits.",
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            "--wait",
            envvar="STEPFS_WAIT",
            metavar="SECONDS",
            help="Opening a file of a step that is not committed yet waits that long for it.",
        ),
    ] = None,
    stat_waits: Annotated[
        bool,
        typer.Option(
            "--stat-waits",
            envvar="STEPFS_STAT_WAITS",
            help="Under --steps, a file's size waits for its step, too, and with it `exists` and `glob`.",
        ),
    ] = False,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", envvar="STEPFS_GROUP", metavar="NAME", help="The training run that reads here."
        ),
    ] = None,
    cache_dir: Annotated[
        str | None,
        typer.Option(
            "--cache-dir",
            envvar="STEPFS_CACHE_DIR",
            metavar="DIR",
            help="Keep fetched slices on this disk, too; the next mount after a crash adopts them.",
        ),
    ] = None,
    cache_size: Annotated[
        str | None,
        typer.Option(
            "--cache-size",
            envvar="STEPFS_CACHE_SIZE",
            metavar="8G",
            help="For slices on the disk of --cache-dir (default 8G); without one, the same as --memory-size.",
        ),
    ] = None,
    memory_size: Annotated[
        str | None,
        typer.Option(
            "--memory-size",
            envvar="STEPFS_MEMORY_SIZE",
            metavar="8G",
            help="For slices in memory, page cache included (default: a quarter of what is free, beyond 8G a sixteenth).",
        ),
    ] = None,
    prefetch: Annotated[
        int | None,
        typer.Option(
            "--prefetch", envvar="STEPFS_PREFETCH", metavar="STEPS", min=0, help="Steps to fetch ahead."
        ),
    ] = None,
    connections: Annotated[
        int,
        typer.Option(
            "--connections",
            envvar="STEPFS_CONNECTIONS",
            metavar="N",
            min=1,
            max=128,
            help="Requests for data at a time, at most; fewer where more do not help.",
        ),
    ] = 64,
    poll: Annotated[
        str,
        typer.Option(
            "--poll", envvar="STEPFS_POLL", metavar="100ms", help="Shortest interval between looks."
        ),
    ] = "100ms",
    show_last: Annotated[
        int | None,
        typer.Option(
            "--show-last", envvar="STEPFS_SHOW_LAST", metavar="N", min=1, help="List only the newest N."
        ),
    ] = None,
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-dir", envvar="STEPFS_CHECKPOINT_DIR", metavar="DIR", help="Watch checkpoints there."
        ),
    ] = None,
    next_step: Annotated[
        str | None,
        typer.Option(
            "--next-step",
            envvar="STEPFS_NEXT_STEP",
            metavar="EXPR",
            help="Checkpoint counter N to next step (default N).",
        ),
    ] = None,
    trust_checkpoints: Annotated[
        bool,
        typer.Option(
            "--trust-checkpoints",
            envvar="STEPFS_TRUST_CHECKPOINTS",
            help="Record a watched checkpoint at once, though no reader of the group has opened the step before its next.",
        ),
    ] = False,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", envvar="STEPFS_ALLOW_OTHER", help="Let other users read, too.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            envvar="STEPFS_METRICS_PORT",
            metavar="PORT",
            min=1,
            max=65535,
            help="Serve Prometheus metrics (/metrics, and /healthz).",
        ),
    ] = None,
    metrics_address: Annotated[
        str,
        typer.Option(
            "--metrics-address",
            envvar="STEPFS_METRICS_ADDRESS",
            metavar="ADDRESS",
            help="Serve them on this address (0.0.0.0: on all).",
        ),
    ] = "127.0.0.1",
    prime: Annotated[
        bool,
        typer.Option(
            "--prime/--no-prime", envvar="STEPFS_PRIME", help="Push fetched steps into the page cache."
        ),
    ] = True,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Mount a lake on a directory: one directory per committed step, one read-only file per rank."""
    from stepfs.format.arguments import parse_duration, parse_interval, parse_size
    from stepfs.mount.host.mountinfo import real_directory
    from stepfs.mount.options import MountOptions
    from stepfs.view.selection import parse_ranks, parse_steps

    check_watching(checkpoint_dir, group, next_step, trusts=trust_checkpoints)
    options = MountOptions(
        lake=lake,
        directory=real_directory(Path(directory)),
        endpoint_url=endpoint_url,
        ranks=None if ranks is None else parse_ranks(ranks),
        world=world,
        mesh=mesh,
        steps=None if steps is None else parse_steps(steps),
        wait_s=None if wait is None else parse_duration(wait),
        stat_waits=stat_waits,
        group=group,
        cache_dir=None if cache_dir is None else Path(cache_dir).absolute(),
        cache_bytes=None if cache_size is None else parse_size(cache_size),
        memory_bytes=None if memory_size is None else parse_size(memory_size),
        prefetch_steps=prefetch,
        connections=connections,
        poll_s=parse_interval(poll),
        show_last=show_last,
        checkpoint_dir=None if checkpoint_dir is None else str(Path(checkpoint_dir).absolute()),
        next_step=next_step or "N",
        trust_checkpoints=trust_checkpoints,
        allow_other=allow_other,
        metrics_port=metrics_port,
        metrics_address=metrics_address,
        prime=prime,
    )
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
