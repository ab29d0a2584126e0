"""One source's documents as token ids in the two files that Megatron reads: tokenised once, for any number of mixes.

Workers write the ids of a few fragments each into a file of their own; the command joins these in the order of the
listing, and makes the index last, so a directory with an index has all of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import trio

from stepfs._internal.limits import usable_cpus
from stepfs.errors import CorruptError, RefusedError, UsageError
from stepfs.lake.concurrency import in_order
from stepfs_producer.engine.local import local_engine
from stepfs_producer.engine.retry import TaskRunner
from stepfs_producer.engine.worker import preload
from stepfs_producer.plan.holds import Part, lack
from stepfs_producer.plan.order import BlockAddress
from stepfs_producer.plan.samples import SKIPS_MIN
from stepfs_producer.plan.values import nearest
from stepfs_producer.run.prepare import LocatedPlan, looked_up
from stepfs_producer.sources.listing import Layout
from stepfs_producer.sources.megatron import index_of
from stepfs_producer.sources.reading import read_block
from stepfs_producer.sources.record import BlockTask, SourceSpec
from stepfs_producer.transforms.documents import TransformSpec
from stepfs_producer.transforms.records import timed_transform

_GIVE_UP_AFTER_S: Final = 600.0
_AHEAD: Final = 4  # tasks for each worker
_WIDE: Final = 1 << 16  # a vocabulary whose ids take four bytes
_COPIED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Tokenisation:
    """What was written."""

    source: str
    prefix: str  # of the two files
    documents: int
    tokens: int
    token_bytes: int
    skipped: int  # records that cannot be decoded
    first_skipped: str | None  # file, place and reason

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class _Part:
    """Documents of a few fragments, in a file of their own."""

    lengths: np.ndarray[Any, np.dtype[np.int32]]
    records: int
    bad: tuple[tuple[int, int, str], ...]  # file, offset, why


@dataclass(slots=True)
class _Sum:
    lengths: list[np.ndarray[Any, np.dtype[np.int32]]] = field(default_factory=list)
    records: int = 0
    bad: int = 0
    first_bad: str | None = None


async def tokenize_source(
    place: LocatedPlan,
    name: str,
    prefix: Path,
    workers: int | None = None,
    *,
    show: Callable[[int, int], None] = lambda _done, _all: None,
) -> Tokenisation:
    """Write every document of an epoch of the source, as stored, to `prefix`.bin and `prefix`.idx.

    `show` gets fragments done and all. `UsageError` for a source whose documents are more than token ids, or whose name is
    none; `RefusedError` if the files are there; `CorruptError` for a bad record, as the source's `on_error` says.
    """
    _check(place, name)
    data, index = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
    for file in (data, index):
        if file.exists():
            raise RefusedError(f"{file} exists; name another OUT, or remove it")
    prepared = await looked_up(place)
    [found] = [one for one in prepared.sources if one.spec.name == name]
    spec = replace(found.spec, source=found.spec.source.changed(shuffle=None, epochs=1))
    layout = Layout(spec, found.layout.listing)
    kind = np.dtype("<i4" if prepared.payloads.vocabulary > _WIDE else "<u2")
    workers = workers or usable_cpus()
    total = _Sum()
    with _beside(prefix) as parts, (parts / "data").open("wb") as joined:
        async with local_engine(workers, preload=partial(preload, place.directory, prepared.modules)) as engine:
            runner = TaskRunner(engine, _GIVE_UP_AFTER_S)

            async def one(task: BlockTask) -> _Part:
                own = str(parts / f"{task.place.fragment:09d}")
                what = f"source {name}: fragment {task.place.fragment}"
                return await runner.carry_out(what, name, tokenized, spec, found.transform, task, kind.str, own)

            async with aclosing(in_order(_tasks(layout), one, number=_AHEAD * workers)) as done:
                async for task, part in done:
                    _add(total, part, spec, layout)
                    own = parts / f"{task.place.fragment:09d}"
                    with own.open("rb") as made, _writing(prefix.parent):
                        await trio.to_thread.run_sync(shutil.copyfileobj, made, joined, _COPIED_BYTES)
                    own.unlink()
                    show(task.next_fragment.fragment or layout.fragments_count, layout.fragments_count)
        lengths = np.concatenate([np.empty(0, np.int32), *total.lengths])
        with _writing(prefix.parent):
            (parts / "index").write_bytes(index_of(lengths, kind))
            joined.flush()
            data.hardlink_to(parts / "data")  # unlike a rename, it replaces no file of another command
            index.hardlink_to(parts / "index")
    tokens = int(lengths.sum(dtype=np.int64))
    return Tokenisation(name, str(prefix), len(lengths), tokens, kind.itemsize, total.bad, total.first_bad)


def tokenized(spec: SourceSpec, transform: TransformSpec, task: BlockTask, kind: str, path: str) -> _Part:
    """In a worker: write the ids of all blocks of a task's fragments to `path`."""
    lengths, bad, records = [np.empty(0, np.int32)], [], 0
    with Path(path).open("wb") as file:
        while True:
            block = read_block(spec, task)
            made, _ = timed_transform(transform, spec.seed, 0, spec.name, block.records)
            of_bad = (
                (block.records.files[index], block.records.offsets[index], why) for index, why in made.bad.items()
            )
            bad += [(int(number), int(offset), why) for number, offset, why in of_bad]
            tokens = made.heads.tokens
            lengths.append(tokens[tokens > 0].astype(np.int32))
            records += len(block.records)
            with _writing(Path(path).parents[1]):
                file.write(made.samples.ids.values.astype(kind).data)
                file.flush()
            if block.follows == task.next_fragment:
                return _Part(np.concatenate(lengths), records, tuple(bad))
            task = replace(task, place=block.follows)


def _check(place: LocatedPlan, name: str) -> None:
    sources = place.plan.sources
    if name not in sources:
        raise UsageError(f"the plan has no source {name!r}{nearest(name, sources)}")
    source = sources[name]
    _, mask, labels = source.id_fields or (None, None, None)
    more: Mapping[str, tuple[object, Part]] = {
        "chat": (source.chat, Part.LABELS),
        "pair": (source.pair, Part.SPANS),
        "mask_field": (mask, Part.LABELS),
        "labels_field": (labels, Part.LABELS),
        "images": (source.images, Part.COLUMNS),
        "tag": (source.tag, Part.TAGS),
    }
    for key, (value, part) in more.items():
        if value is not None:
            what = str(lack(".bin", part)).partition(";")[0]
            raise UsageError(f"source {name} has {key}, and {what}; tokenise it in each run")
    if source.fim is not None:
        raise UsageError(
            f"source {name} has fim, which is drawn anew in each epoch; take it out here, and give it to the source that reads OUT"
        )


def _tasks(layout: Layout) -> Iterator[BlockTask]:
    """The fragments of an epoch, a few at a time."""
    at = BlockAddress(0, 0, 0)
    while not at.epoch and (task := layout.task(at)) is not None:
        yield task
        at = task.next_fragment


def _add(total: _Sum, part: _Part, spec: SourceSpec, layout: Layout) -> None:
    """`CorruptError` for the first bad record of a source that stops there, and for too many of one that skips some."""
    total.lengths.append(part.lengths)
    total.records += part.records
    total.bad += len(part.bad)
    if not part.bad:
        return
    number, offset, why = part.bad[0]
    text = f"{layout.listing.files[number].name} at {offset}: {why}"
    total.first_bad = total.first_bad or text
    budget = spec.source.on_error.budget
    if budget is None:
        raise CorruptError(f"source {spec.name}: {text}; repair the file, or write on_error: skip")
    if total.bad > max(SKIPS_MIN, int(budget.at_most * total.records)):
        raise CorruptError(
            f"source {spec.name}: {total.bad} of {total.records} records cannot be decoded, the first {text}; repair the files, "
            "or allow more with on_error: {do: skip, at_most: …}"
        )


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """An error of the disk is none of a store's, which would be tried again."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror or error}; nothing of this was left there, make room or name another OUT"
        raise RefusedError(f"{directory}: {why}") from error


@contextmanager
def _beside(prefix: Path) -> Iterator[Path]:
    """A directory beside the files, so that they can be renamed into place."""
    try:
        with TemporaryDirectory(prefix=f".{prefix.name}.", dir=prefix.parent) as directory:
            yield Path(directory)
    except FileNotFoundError as error:
        raise UsageError(f"{prefix.parent} is no directory; make it first") from error
