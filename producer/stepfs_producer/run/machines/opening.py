"""The engine that the options of a run name. To a Ray cluster the plan's directory travels: modules, and the tokenizer."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from stepfs.limits import usable_cpus
from stepfs_producer.engine.api import Engine
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.worker import preload
from stepfs_producer.run.options import RunOptions, Workers
from stepfs_producer.run.prepare import PreparedPlan
from stepfs_producer.run.source_loader import LoadedSource


@asynccontextmanager
async def open_engine(
    options: RunOptions, directory: str, prepared: PreparedPlan, say: Callable[[str], None]
) -> AsyncIterator[tuple[Engine, int]]:
    """The engine, and how many workers it may reach. Its workers end with it."""
    cores = usable_cpus()
    if options.engine == "local":
        workers = options.workers or Workers(cores, cores)
        async with local_engine(workers.least, preload=partial(preload, directory, prepared.modules)) as engine:
            yield engine, workers.most
        return
    from stepfs_producer.engine.ray import ray_engine  # noqa: PLC0415  (an extra, which few runs need)

    sources, given = prepared.sources, options.workers
    travels = any(
        source.transform.call or source.transform.tokenizer.file or ":" in source.spec.format for source in sources
    )
    async with ray_engine(
        options.ray_address or os.environ.get("RAY_ADDRESS") or "auto",
        None if given is None else given.least,
        preload=partial(preload, ".", prepared.modules),
        environment=travelling(directory, sources) if travels else {},
        say=say,
    ) as engine:
        yield engine, engine.workers if given is None else given.most


def travelling(directory: str, sources: Sequence[LoadedSource]) -> dict[str, object]:
    """Have Ray send the plan's directory to the nodes, without its sources' files and what is hidden."""
    here = Path(directory).resolve()
    names: dict[Path, set[str]] = defaultdict(set)
    for file in (file for source in sources for file in source.layout.listing.files):
        names[Path(file.location).parent].add(Path(file.location).name)
    left_out: list[Path] = []
    for parent, inside in names.items():
        if parent.is_relative_to(here):
            # One pattern for a directory of nothing else: Ray matches every name with every pattern.
            whole = parent != here and inside.issuperset(path.name for path in parent.iterdir())
            left_out += [parent] if whole else [parent / name for name in sorted(inside)]
    patterns = [re.sub(r"([\\*?\[\]! ])", r"\\\1", path.relative_to(here).as_posix()) for path in left_out]
    return {"working_dir": str(here), "excludes": [".?*", "__pycache__", *("/" + one for one in patterns)]}


def as_nodes_see(sources: Sequence[LoadedSource], directory: str) -> tuple[LoadedSource, ...]:
    """The sources as machines see them that have a copy of the plan's directory as their current one."""
    here = Path(directory).resolve()

    def moved(source: LoadedSource) -> LoadedSource:
        tokenizer = source.transform.tokenizer
        if tokenizer.file is None:
            return source
        file = Path(tokenizer.file).resolve()
        name = str(file.relative_to(here)) if file.is_relative_to(here) else str(file)
        return replace(source, transform=replace(source.transform, tokenizer=replace(tokenizer, file=name)))

    return tuple(map(moved, sources))
