"""`stepfs init`: create a lake, once."""

from __future__ import annotations

from typing import Annotated

import typer

from stepfs.cli.given_schema import FromPayload, PayloadSchemaOption, schema_text
from stepfs.cli.options import EndpointUrl, Lake
from stepfs.store.options import StoreOptions


def init(
    lake: Lake,
    slices: Annotated[
        int,
        typer.Option(
            "--slices",
            envvar="STEPFS_SLICES",
            metavar="N",
            help="Files per step: one per data-parallel rank.",
        ),
    ],
    ext: Annotated[
        str, typer.Option("--ext", envvar="STEPFS_EXT", metavar=".EXT", help="Extension of the files.")
    ] = ".safetensors",
    check_payload: Annotated[
        bool,
        typer.Option(
            "--check-payload",
            envvar="STEPFS_CHECK_PAYLOAD",
            help="Record that slices are files of this extension; producers check their first batch.",
        ),
    ] = False,
    payload_schema: PayloadSchemaOption = None,
    from_payload: FromPayload = None,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Create a lake.

    Refuses one that exists, and a store whose conditional writes cannot be trusted. The prefix or directory is
    created, a bucket never is.
    """
    import trio

    from stepfs.format.records import check_ext

    check_ext(ext)
    schema = schema_text(payload_schema, from_payload, ext)
    trio.run(_init, lake, slices, ext, check_payload, schema, StoreOptions(endpoint_url))


async def _init(
    lake: str, slices: int, ext: str, check_payload: bool, schema: str | None, store_options: StoreOptions
) -> None:
    from stepfs.cli.failure import say
    from stepfs.cli.target import opened_store
    from stepfs.doctor.lakes import note_versions
    from stepfs.lake.identity import create_lake
    from stepfs.store.versioning import keeps_versions

    async with opened_store(lake, store_options) as store:
        identity = await create_lake(
            store, slices=slices, ext=ext, check_payload=check_payload, payload_schema=schema
        )
        files = f"rank-00000{identity.ext}" + (
            f" … rank-{slices - 1:05d}{identity.ext}" if slices > 1 else ""
        )
        typer.echo(f"created lake {identity.lake_id} at {store.url}: each step holds {files}")
        if await keeps_versions(store):
            advice = note_versions()
            say(f"stepfs: {advice.detail}; {advice.remedy}")
