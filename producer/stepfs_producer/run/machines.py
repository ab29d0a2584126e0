"""The machines that work for a run: the engine that its options name, and the lacks of each machine."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import trio

from stepfs._internal.limits import usable_cpus
from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import Epoch
from stepfs.format.keys import data_key
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store
from stepfs_producer.engine.api import Engine, NodeCheck
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.worker import preload
from stepfs_producer.plan.sources import Source
from stepfs_producer.run.lake import libraries
from stepfs_producer.run.load import LoadedSource
from stepfs_producer.run.options import RunOptions, Workers
from stepfs_producer.run.prepare import PreparedPlan
from stepfs_producer.sources.files import open_listed
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.record import FileRef, SourceSpec
from stepfs_producer.transforms.documents import TransformSpec
from stepfs_producer.transforms.tokenizer import load_tokenizer
from stepfs_producer.transforms.user_function import function_of


@dataclass(frozen=True, slots=True)
class Requirements:
    """The needs of a run, of every machine."""

    libraries: Mapping[str, str | None]
    sources: Sequence[tuple[SourceSpec, TransformSpec, FileRef | None]]  # with their first files
    lake_id: str
    options: RunOptions


def node_check(sources: Sequence[LoadedSource], identity: LakeIdentity, options: RunOptions) -> NodeCheck:
    """A call that finds the lacks of another machine, there."""
    firsts = []
    for one in sources:
        refs = (one.layout.fragment(number).ref for number in range(one.layout.fragments_count))
        firsts.append((one.spec, one.transform, next((ref for ref in refs if ref.size), None)))
    here = libraries()
    used = {name: here[name] for name in sorted(_used(sources, identity.ext))}
    return partial(missing_here, Requirements(used, firsts, identity.lake_id, options))


def _used(sources: Sequence[LoadedSource], ext: str) -> set[str]:
    """The libraries on which the bytes of a plan's steps depend."""
    found = {"stepfs", "python", "numpy"} | ({"torch"} if ext == ".pt" else set())
    for one in sources:
        source = one.spec.source
        known = {
            "tokenizers": one.transform.tokenizer.file is not None,
            "jinja2": source.chat is not None,
            "pillow": source.images is not None,
            "pyarrow": source.format in {"arrow", "parquet"},
            "zstandard": any(file.name.endswith(".zst") for file in one.layout.listing.files),
        }
        found |= {name for name, is_used in known.items() if is_used}
    return found


def missing_here(needs: Requirements) -> list[str]:
    """The lacks of this machine, each as the end of a sentence about it.

    `StoreUnreachableError`: a store is away, which says nothing about the machine.
    """
    here = libraries()
    lines = [
        f"has {name} {here[name] or 'not'}, the command {version}; install the same"
        for name, version in needs.libraries.items()
        if here[name] != version
    ]
    for spec, transform, first in needs.sources:
        try:
            format_of(spec)
            if spec.source.transform is not None:
                function_of(spec.source.transform)
            load_tokenizer(transform.tokenizer)
            if first is not None:
                with open_listed(spec, first) as file:
                    file.read(0, min(first.size, 1))
        except StoreUnreachableError:
            raise
        except (StepfsError, OSError) as error:
            lines.append(f"cannot work for source {spec.name}: {error}")
    try:
        trio.run(_put, needs)
    except StoreUnreachableError:
        raise
    except (StepfsError, OSError) as error:
        lines.append(f"cannot put into the lake {needs.options.lake}: {error}")
    return list(dict.fromkeys(line.replace("\n", " ") for line in lines))


async def _put(needs: Requirements) -> None:
    """An object of no incarnation, which the next reclaim deletes like uploads of killed producers."""
    options = needs.options
    store = open_store(options.lake, options=options.store_options)
    try:
        if (await open_lake(store)).lake_id != needs.lake_id:
            raise RefusedError("another lake stands there; it has to be the same storage on every machine")
        await store.put(data_key(needs.lake_id, options.producer_id, Epoch(0), 0), [b"probe"])
    finally:
        await store.aclose()


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
        one.transform.tokenizer.file or one.spec.source.transform or isinstance(one.spec.source, Source)
        for one in sources
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
        there = replace(tokenizer, tokenizer=tokenizer.tokenizer.changed(file=name))
        return replace(source, transform=replace(source.transform, tokenizer=there))

    return tuple(map(moved, sources))
