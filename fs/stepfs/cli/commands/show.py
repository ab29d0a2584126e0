"""`stepfs show`: the arrays of a payload and a few of their values, or the beginning of any other."""

from __future__ import annotations

import json
import math
import mmap
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, printable, size_text, table
from stepfs.cli.options import EndpointUrl, Json, not_empty
from stepfs.cli.target import is_lake, lake_of, opened_lineage, view_of
from stepfs.errors import AbsentError, CorruptError, RefusedError, UsageError
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.lake.kept_plans import LineageReader
    from stepfs.view.mounted import View

_VALUES: Final = 8
_BEGIN_BYTES: Final = 256  # of a payload without arrays
_LINE_CHARACTERS: Final = 200
_PLACE: Final = ("file", "lake", "lake_id", "step", "rank", "micro_batch", "beside", "producer")


@dataclass(frozen=True, slots=True)
class _Payload:
    """One payload, and where it lies."""

    name: str
    ext: str
    data: memoryview
    place: Mapping[str, object]


def show(
    target: Annotated[
        str,
        typer.Argument(
            metavar="LAKE|DIR|FILE", help="A lake, the directory it is mounted on, or a payload.", callback=not_empty
        ),
    ],
    step: Annotated[int | None, Opt("--step", "Of a lake or mount; the newest by default.", "N", least=0)] = None,
    rank: Annotated[int | None, Opt("--rank", "Of a lake or mount: whose file; 0 by default.", "R", least=0)] = None,
    micro: Annotated[int, Opt("--micro", "Of a lake or mount: which micro-batch of the rank.", "M", least=0)] = 0,
    beside: Annotated[str, Opt("--beside", "Of a lake or mount: the file NAME beside the rank's.", "NAME")] = "",
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show the arrays of a payload, with dtype, shape and first values; no code of a file runs.

    Takes .safetensors and .npy files, and .pt where torch is installed. Of other files it shows the beginning.
    """
    is_file = not is_lake(target) and not Path(target).is_dir()

    async def find() -> _Payload:
        if not is_file:
            lake, options = lake_of(target, StoreOptions(endpoint_url))
            async with opened_lineage(lake, options) as reader:
                return await _slice(reader, lake, view_of(target, reader.log), step, rank or 0, micro, beside)
        asked = {"--step": step, "--rank": rank, "--micro": micro or None, "--beside": beside or None}
        if given := [option for option, value in asked.items() if value is not None]:
            raise UsageError(f"{given[0]} is for lakes; {target} is one payload")
        path = Path(target)
        return _Payload(str(path), path.suffix, _mapped(path), {"file": str(path)})

    document = _document(payload := interruption.run(find))
    typer.echo(json_text(document) if as_json else "\n".join(_lines(payload.name, document)))


def _mapped(path: Path) -> memoryview:
    """A file's bytes. `UsageError` for anything but a file: opening a FIFO waits for a writer."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: is not a regular file; name a file that holds one payload")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if found.st_size else b"")
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such file; name one that exists, or the URL of a lake") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or error}; name a readable file") from error


async def _slice(
    reader: LineageReader, lake: str, view: View, step: int | None, rank: int, micro: int, beside: str
) -> _Payload:
    from stepfs.view.names import step_name

    identity, names = reader.log.identity, view.names(reader.log.identity)
    ranks, files = names.ranks, identity.grid.files
    if rank >= ranks.world or micro >= ranks.micro_batches:
        raise UsageError(
            f"--rank {rank} --micro {micro}: there are {ranks.world} ranks here, and {ranks.micro_batches} files of each"
        )
    if beside not in files:
        known = ", ".join(filter(None, files)) or "none"
        raise UsageError(f"--beside {beside}: no file of that name is beside a rank's (there are: {known})")
    file = files.index(beside)
    steps = view.readable()
    if not steps:
        raise AbsentError(f"{lake}: has no step yet")
    entry = await reader.log.entry(view.check(steps[-1] if step is None else step))
    [(_, data)] = [found async for found in reader.payloads(entry, [ranks.slice_of(rank, micro, file)])]
    name = f"{step_name(entry.step).decode()}/{names.of_rank(rank, micro, file).decode()}"
    where = (None, lake, identity.lake_id, entry.step, rank, micro, beside, entry.producer_id)
    return _Payload(name, identity.ext, data, dict(zip(_PLACE, where, strict=True)))


def _document(payload: _Payload) -> dict[str, Any]:
    from stepfs.payload import Contents, UnreadablePayloadError, last_suffix, read_arrays

    try:
        found = read_arrays(payload.ext, payload.data, pt_values=False)
    except UnreadablePayloadError as error:
        raise CorruptError(f"{payload.name}: {error}") from error
    contents = found or Contents((), {})
    return {
        **dict.fromkeys(_PLACE),
        **payload.place,
        "format": last_suffix(payload.ext)[1:] if payload.ext else "",
        "bytes": len(payload.data),
        "arrays": [array.document(_VALUES) for array in contents.arrays],
        "facts": json.loads(json.dumps(contents.facts, default=str), parse_constant=str),  # JSON has no NaN
        "begins": None if found else bytes(payload.data[:_BEGIN_BYTES]).decode("utf-8", "backslashreplace"),
    }


def _lines(name: str, document: Mapping[str, Any]) -> Iterator[str]:
    by = f", by {printable(document['producer'])}" if document["producer"] is not None else ""
    yield f"{printable(name)}  {document['format'] or 'no extension'}, {size_text(document['bytes'])}{by}"
    rows = [
        [printable(one["name"]), printable(one["dtype"]), str(one["shape"]), _few(one["values"], one["shape"])]
        for one in document["arrays"]
    ]
    yield from table(["ARRAY", "DTYPE", "SHAPE", "VALUES"], rows)
    facts = [f"{fact}: {value}" for fact, value in document["facts"].items()]
    for line in map(printable, [*facts, *(document["begins"] or "").splitlines()]):
        yield line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 1]}…"


def _few(values: list[Any] | None, shape: list[int]) -> str:
    texts = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in values or []]
    return "-" if values is None else " ".join([*texts, *(["…"] if len(texts) < math.prod(shape) else [])])
