"""`stepfs show`: the arrays of a payload, a few of their values, and text if there is a tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from stepfs import interruption
from stepfs.cli.columns import json_text, printable, size_text, table
from stepfs.cli.options import EndpointUrl, Json, not_empty, opt
from stepfs.cli.payload_bytes import PayloadBytes, ends_of, file_bytes, slice_bytes
from stepfs.cli.target import is_lake, lake_of, opened_log, origin_stores, view_of
from stepfs.errors import AbsentError, CorruptError, UsageError
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stepfs.format.payload.arrays import ArrayInfo, ByTorch, PayloadArrays
    from stepfs.format.payload.excerpt import Excerpt
    from stepfs.format.payload.schema import PayloadSchema
    from stepfs.lake.log.reader import LogReader
    from stepfs.lake.origins import OriginStores
    from stepfs.view.mounted import View

_VALUES: Final = 8
_FACT_CHARACTERS: Final = 200


@dataclass(frozen=True, slots=True)
class _Payload:
    """One payload, and its facts from the lake."""

    name: str
    ext: str
    data: PayloadBytes
    schema: PayloadSchema | None = None
    files: tuple[str, ...] = ("",)  # of the lake's grid
    file: int = 0
    place: Mapping[str, object] = field(default_factory=dict)  # for the document


@dataclass(frozen=True, slots=True)
class _Shown:
    """Everything that is shown."""

    payload: _Payload
    format: str
    arrays: tuple[ArrayInfo, ...]
    values: tuple[list[Any] | None, ...]
    facts: Mapping[str, object]
    text: str | None
    problem: str | None


def show(
    target: Annotated[
        str,
        typer.Argument(
            metavar="LAKE|DIR|FILE",
            help="A lake, the directory it is mounted on, or a payload.",
            callback=not_empty,
        ),
    ],
    step: Annotated[int | None, opt("--step", "Of a lake or mount; the newest by default.", "N", least=0)] = None,
    rank: Annotated[int | None, opt("--rank", "Of a lake or mount: whose file; 0 by default.", "R", least=0)] = None,
    micro: Annotated[int, opt("--micro", "Of a lake or mount: which micro-batch of the rank.", "M", least=0)] = 0,
    beside: Annotated[
        str, opt("--beside", "Of a lake or mount: the file of that name beside the rank's.", "NAME")
    ] = "",
    tokenizer: Annotated[
        str | None,
        opt(
            "--tokenizer",
            "Show input_ids as text: a model's tokenizer.json, or bytes; by default the lake's.",
            "bytes|FILE",
        ),
    ] = None,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show the contents of a payload: arrays with dtype, shape and first values, and text.

    Only headers and a few values are read, and no code of a file runs. Takes .safetensors and .npy files, .bin of a lake
    with a payload schema, and .pt where torch is installed.
    """
    is_file = not is_lake(target) and not Path(target).is_dir()

    async def find() -> _Shown:
        if not is_file:
            lake, options = lake_of(target, StoreOptions(endpoint_url))
            async with opened_log(lake, options, reads_only=True) as log, origin_stores(log.store, options) as origins:
                return await _shown(
                    await _slice(log, lake, view_of(target, log), origins, step, rank or 0, micro, beside), tokenizer
                )
        asked = (("--step", step), ("--rank", rank), ("--micro", micro or None), ("--beside", beside or None))
        for option, given in asked:
            if given is not None:
                raise UsageError(f"{option} is for lakes; {target} is one payload")
        path = Path(target)
        payload = _Payload(str(path), path.suffix, file_bytes(path), place={"file": str(path)})
        return await _shown(payload, tokenizer)

    shown = interruption.run(find)
    typer.echo(json_text(_document(shown)) if as_json else "\n".join(_lines(shown)))
    if shown.problem is not None:
        raise CorruptError(f"{shown.payload.name}: {shown.problem}")


async def _slice(
    log: LogReader, lake: str, view: View, origins: OriginStores, step: int | None, rank: int, micro: int, beside: str
) -> _Payload:
    from stepfs.lake.identity import payload_schema
    from stepfs.view.names import step_name

    identity, names = log.identity, view.names(log.identity)
    ranks = names.ranks
    if rank >= ranks.world or micro >= ranks.micro_batches:
        raise UsageError(
            f"--rank {rank} --micro {micro}: there are {ranks.world} ranks here, and {ranks.micro_batches} files of each"
        )
    files = identity.grid.files
    if beside not in files:
        known = ", ".join(filter(None, files)) or "none"
        raise UsageError(f"--beside {beside}: no file of that name is beside a rank's (there are: {known})")
    file = files.index(beside)
    index = ranks.slice_of(rank, micro, file)
    steps = view.readable()
    if not steps:
        raise AbsentError(f"{lake}: has no step yet")
    entry = await log.entry(view.check(steps[-1] if step is None else step))
    ref = entry.tgb.slice(index)
    data = await slice_bytes(await origins.of(entry.tgb, log.state), entry.tgb.key, ref)
    name = f"{step_name(entry.step).decode()}/{names.of_rank(rank, micro, file).decode()}"
    place: dict[str, object] = {"lake": lake, "lake_id": identity.lake_id, "step": entry.step}
    place |= {"rank": rank, "micro_batch": micro, "beside": beside, "producer": entry.producer_id}
    return _Payload(name, identity.ext, data, payload_schema(identity, lake), files, file, place)


async def _shown(payload: _Payload, tokenizer: str | None) -> _Shown:
    from stepfs.cli.payload_text import TOKENS, decoder, ids_array
    from stepfs.format.payload.check import PayloadCheck
    from stepfs.format.payload.schema import format_of
    from stepfs.format.payload.values import plain
    from stepfs.torch.process import TorchProcess

    decode = decoder(tokenizer, payload.schema.tokenizer if payload.schema is not None else {})
    ends = await ends_of(payload.data)
    problem = None
    with TorchProcess() as by_torch:
        if payload.schema is not None and payload.schema.binding:
            check = PayloadCheck(payload.ext, payload.schema, by_torch, payload.files)
            problem = check.of_slice(payload.file).problem(ends)
        found = _found(payload, ends, by_torch)
    values = [await _values(payload.data, array, _VALUES) for array in found.arrays]
    ids = ids_array(found.arrays) if decode is not None else None
    tokens = None if ids is None else await _values(payload.data, ids, TOKENS)
    return _Shown(
        payload,
        format_of(payload.ext),
        found.arrays,
        tuple(None if each is None else plain(each) for each in values),
        found.facts,
        None if decode is None or tokens is None else decode(tokens.tolist()),
        problem,
    )


def _found(payload: _Payload, ends: Excerpt, by_torch: ByTorch) -> PayloadArrays:
    """The arrays. `UsageError` for a format without any, `CorruptError` for a file that is not of its format."""
    from stepfs.format.payload.arrays import FORMATS, PayloadArrays, read_arrays
    from stepfs.format.payload.check import payload_arrays
    from stepfs.format.payload.excerpt import UnreadablePayloadError
    from stepfs.format.payload.schema import format_of

    name = format_of(payload.ext)
    schema = payload.schema
    try:
        if schema is not None and schema.arrays is not None and schema.format == "bin":
            return PayloadArrays(payload_arrays(schema, ends, by_torch), {})
        if name not in FORMATS:
            raise UsageError(
                f"{payload.name}: arrays are found in {' '.join(f'.{each}' for each in FORMATS)} files, and in .bin of a lake "
                f"with a payload schema, not in {payload.ext or 'a file without extension'}"
            )
        return read_arrays(name, ends, by_torch)
    except UnreadablePayloadError as error:
        raise CorruptError(f"{payload.name}: {error}") from error


async def _values(data: PayloadBytes, array: ArrayInfo, count: int) -> NDArray[Any] | None:
    from stepfs.format.payload.values import LOCAL_HEADER_BYTES, decode, member_values_at, values_bytes

    size = values_bytes(array, count)
    if size is None:
        return None
    at = array.offset
    if array.member_at is not None:
        at += array.member_at + member_values_at(await data.read(array.member_at, LOCAL_HEADER_BYTES))
    return decode(array.dtype, await data.read(at, size)) if at + size <= data.length else None


def _document(shown: _Shown) -> dict[str, Any]:
    from stepfs.format.payload.schema import ArraySpec, PayloadSchema

    schema = shown.payload.schema
    if schema is None:  # what `init --payload-schema` takes
        arrays = {array.name: ArraySpec(array.dtype, array.shape) for array in shown.arrays}
        schema = PayloadSchema(shown.format, arrays)
    nothing = dict.fromkeys(("file", "lake", "lake_id", "step", "rank", "micro_batch", "beside", "producer"))
    return {
        **nothing,
        **shown.payload.place,
        "format": shown.format,
        "bytes": shown.payload.data.length,
        "arrays": [
            {
                "name": array.name,
                "dtype": array.dtype,
                "shape": list(array.shape),
                "bytes": array.nbytes,
                "values": values,
            }
            for array, values in zip(shown.arrays, shown.values, strict=True)
        ],
        "facts": _plain_facts(shown.facts),
        "text": shown.text,
        "payload_schema": schema.document(),
        "problem": shown.problem,
    }


def _plain_facts(facts: Mapping[str, object]) -> dict[str, Any]:
    """JSON has no NaN: such numbers become text."""
    found: dict[str, Any] = json.loads(json.dumps(facts, default=str), parse_constant=str)
    return found


def _lines(shown: _Shown) -> Iterator[str]:
    where = shown.payload.place.get("lake")
    yield f"{printable(shown.payload.name)}  {shown.format}, {size_text(shown.payload.data.length)}" + (
        f", by {printable(str(shown.payload.place['producer']))}" if where is not None else ""
    )
    rows = [
        [printable(array.name), printable(array.dtype), str(list(array.shape)), _few(array, values)]
        for array, values in zip(shown.arrays, shown.values, strict=True)
    ]
    yield from table(["ARRAY", "DTYPE", "SHAPE", "VALUES"], rows)
    for name, fact in shown.facts.items():
        line = printable(f"{name}: {fact}")
        yield line if len(line) <= _FACT_CHARACTERS else f"{line[: _FACT_CHARACTERS - 1]}…"
    if shown.text is not None:
        yield ""
        yield from map(printable, shown.text.splitlines())


def _few(array: ArrayInfo, values: list[Any] | None) -> str:
    if values is None:
        return "-"
    count = len(values)
    more = " …" if count < math.prod(array.shape) else ""
    return " ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values) + more
