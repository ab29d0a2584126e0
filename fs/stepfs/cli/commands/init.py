"""`stepfs init`: create a lake, once."""

from typing import Annotated

import typer

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text
from stepfs.cli.failure import say
from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.cli.target import opened_store
from stepfs.errors import UsageError
from stepfs.store.api import StoreOptions


def init(
    lake: Lake,
    slices: Annotated[int | None, Opt("--slices", "Files per step: one per data-parallel rank.", "N")] = None,
    data_ranks: Annotated[
        int | None, Opt("--data-ranks", "Data-parallel ranks, where each has several files.", "N")
    ] = None,
    micro_batches: Annotated[int, Opt("--micro-batches", "Files of each rank, one per micro-batch.", "N")] = 1,
    cp: Annotated[
        int, Opt("--cp", "Files of each of these: pieces that the producer cuts for context parallelism.", "N")
    ] = 1,
    ext: Annotated[str, Opt("--ext", "Extension of the files.", ".EXT")] = ".safetensors",
    check_payload: Annotated[
        bool,
        Opt("--check-payload", "Record that slices are files of this extension; producers check their first batch."),
    ] = False,
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Create a lake.

    Refuses one that exists, and a store whose conditional writes cannot be trusted. The prefix or directory is
    created, a bucket never is.
    """
    from stepfs.doctor.lakes import note_versions
    from stepfs.format.grid import Grid
    from stepfs.format.identity import check_ext
    from stepfs.lake.identity import create_lake
    from stepfs.store.probe import keeps_versions
    from stepfs.view.ranks import names_of

    number = data_ranks if slices is None else slices
    if number is None or (slices is not None and (data_ranks, micro_batches, cp) != (None, 1, 1)):
        raise UsageError(
            "give --slices N (one file per data-parallel rank), or --data-ranks N with --micro-batches or --cp"
        )
    grid = Grid(number, micro_batches, cp)
    check_ext(ext)

    async def create() -> None:
        async with opened_store(lake, StoreOptions(endpoint_url)) as store:
            identity = await create_lake(store, slices=grid, ext=ext, check_payload=check_payload)
            names = names_of(identity)
            files = " … ".join(dict.fromkeys(names[place][0].decode() for place in (0, len(names) - 1)))
            made = {
                "lake": store.url,
                "lake_id": identity.lake_id,
                "slices": grid.slices,
                "grid": grid.document(),
                "ext": ext,
            }
            line = f"created lake {identity.lake_id} at {store.url}: each step holds {files}"
            typer.echo(json_text(made, indent=None) if as_json else line)
            if await keeps_versions(store):
                advice = note_versions()
                say(f"stepfs: {advice.detail}; {advice.remedy}")

    interruption.run(create)
