"""A progress bar for people; nothing at all when stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, int, int], None]


@contextmanager
def showing(name: str, files: int) -> Iterator[Show]:
    """A callable (steps, source bytes, files done) → None that keeps the bar current."""
    if not sys.stderr.isatty():
        yield lambda _steps, _source_bytes, _files_done: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(
            "{task.completed}/{task.total} files  {task.fields[steps]} steps  {task.fields[mib]:.1f} MiB"
        ),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=files, steps=0, mib=0.0)

        def show(steps: int, source_bytes: int, files_done: int) -> None:
            progress.update(task, completed=files_done, steps=steps, mib=source_bytes / (1 << 20))

        yield show
