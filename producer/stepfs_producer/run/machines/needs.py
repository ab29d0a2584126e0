"""The needs of a run, and the lacks of a machine that is to work for it: looked at before another run is fenced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs.format.ids import Epoch
from stepfs.format.keys import data_key
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store
from stepfs_producer.engine.api import Look
from stepfs_producer.run.lake import libraries
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.source_loader import LoadedSource
from stepfs_producer.sources.block import FileRef
from stepfs_producer.sources.files.opened import open_listed
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.spec import SourceSpec
from stepfs_producer.transforms.model_tokenizer import load_tokenizer
from stepfs_producer.transforms.spec import TransformSpec
from stepfs_producer.transforms.user import function_of

_COMPARED: Final = ("stepfs", "python", "numpy", "tokenizers")


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a run, of every machine."""

    libraries: Mapping[str, str | None]
    sources: Sequence[tuple[SourceSpec, TransformSpec, FileRef | None]]  # with their first files
    lake_id: str
    options: RunOptions


def look_of(sources: Sequence[LoadedSource], lake_id: str, options: RunOptions) -> Look:
    """A call that finds the lacks of another machine, there."""
    firsts = [
        (one.spec, one.transform, one.layout.fragment(0).ref if one.layout.fragments_count else None) for one in sources
    ]
    return partial(lacking, Needs({name: libraries()[name] for name in _COMPARED}, firsts, lake_id, options))


def lacking(needs: Needs) -> list[str]:
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
            if transform.call is not None:
                function_of(transform.call)
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


async def _put(needs: Needs) -> None:
    """An object of no incarnation, which the next reclaim deletes like uploads of killed producers."""
    options = needs.options
    store = open_store(options.lake, options=options.store_options)
    try:
        if (await open_lake(store)).lake_id != needs.lake_id:
            raise RefusedError("another lake stands there; it has to be the same storage on every machine")
        await store.put(data_key(needs.lake_id, options.producer_id, Epoch(0), 0), [b"probe"])
    finally:
        await store.aclose()
