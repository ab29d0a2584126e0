"""The engine that the options of a run name. To a Ray cluster the plan's directory travels: modules, and the tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from stepfs.errors import UsageError
from stepfs.limits import usable_cpus
from stepfs_producer.engine.api import Engine
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.worker import preload
from stepfs_producer.run.memory import memory_of
from stepfs_producer.run.options import RunOptions, Workers
from stepfs_producer.run.prepare import PreparedPlan
from stepfs_producer.run.source_loader import LoadedSource

TRAVELS_MAX: Final = 100 << 20


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

    address = options.ray_address or os.environ.get("RAY_ADDRESS")
    given = options.workers or (Workers(cores, cores) if address is None else None)
    rules, sources = prepared.rules, prepared.sources
    travels = any(
        source.transform.call or source.transform.tokenizer.file or ":" in source.spec.format for source in sources
    )
    memory = None if given is None else memory_of(options.memory_bytes, rules, sources, given.most)
    async with ray_engine(
        address,
        None if given is None else given.least,
        most=None if given is None else given.most,
        preload=partial(preload, ".", prepared.modules),
        travelling=_travelling(directory, sources) if travels else nullcontext(),
        store_bytes=0 if memory is None else memory.least + memory.held_bytes,
        say=say,
    ) as engine:
        yield engine, engine.workers if given is None else given.most


@contextmanager
def _travelling(directory: str, sources: Sequence[LoadedSource]) -> Iterator[str]:
    """A copy of the plan's directory without its sources' files, to be sent to other machines. `UsageError`: it is large."""
    skipped = {file.location for source in sources for file in source.layout.listing.files}
    here = Path(directory).resolve()
    size = 0

    def left_out(parent: str, names: list[str]) -> list[str]:
        nonlocal size
        found = []
        for name in names:
            path = Path(parent, name)
            if name.startswith(".") or name == "__pycache__" or str(path) in skipped:
                found.append(name)
            elif not path.is_dir():
                size += path.stat().st_size
        if size > TRAVELS_MAX:
            raise UsageError(
                f"{here}: the plan's directory travels to every node, and has more than {TRAVELS_MAX >> 20} MiB beside its "
                "sources' files; give the plan, its modules and its tokenizer a directory of their own"
            )
        return found

    with TemporaryDirectory(prefix="stepfs-plan-") as copy:
        shutil.copytree(here, copy, ignore=left_out, dirs_exist_ok=True)
        yield copy


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
