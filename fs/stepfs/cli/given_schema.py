"""The options that give a lake a payload schema: its text, a file of it, or a sample payload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from stepfs.cli.options import opt
from stepfs.cli.payload_bytes import ends_of, file_bytes, reading
from stepfs.errors import UsageError

if TYPE_CHECKING:
    from stepfs.format.payload.schema import PayloadSchema

PayloadSchemaOption = Annotated[
    str | None,
    opt(
        "--payload-schema",
        "Record the arrays of a slice (JSON); producers check every batch, `verify --content` every slice.",
        "FILE|JSON",
    ),
]
FromPayload = Annotated[
    str | None,
    opt(
        "--from-payload",
        "Record the arrays of this file, with its dtypes and shapes, as those of every slice.",
        "FILE",
    ),
]
_FILE_BYTES_MAX: Final = 1 << 20


async def schema_text(given: str | None, sample: str | None, ext: str) -> str | None:
    """The text to be stored for a lake of `ext` files; None if neither option is given. `UsageError` for mistakes."""
    if given is not None and sample is not None:
        raise UsageError("give --payload-schema or --from-payload, not both")
    if "" in {given, sample}:
        raise UsageError(
            f"--{'from-payload' if given is None else 'payload-schema'}: is empty; name a file, or leave it out"
        )
    if sample is not None:
        return (await _of_sample(Path(sample), ext)).text()
    if given is None:
        return None
    from stepfs.format.payload.schema import given_schema

    if given.lstrip().startswith("{"):
        return given_schema(given, ext, "--payload-schema").text()
    return given_schema(_text_of(Path(given)), ext, given).text()


async def _of_sample(path: Path, ext: str) -> PayloadSchema:
    from stepfs.format.payload.arrays import read_arrays
    from stepfs.format.payload.excerpt import UnreadablePayloadError
    from stepfs.format.payload.schema import ArraySpec, PayloadSchema, format_of, given_schema
    from stepfs.torch.process import TorchProcess

    what = f"--from-payload {path}"
    try:
        with TorchProcess() as by_torch:
            found = read_arrays(format_of(ext), await ends_of(file_bytes(path)), by_torch).arrays
    except UnreadablePayloadError as error:
        raise UsageError(f"{what}: {error}") from error
    arrays = {array.name: ArraySpec(array.dtype, array.shape) for array in found}
    # Through the parser: a dtype or a name that no schema can have is reported here.
    return given_schema(PayloadSchema(format_of(ext), arrays).text(), ext, what)


def _text_of(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        data = file.read(_FILE_BYTES_MAX)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is no JSON in UTF-8 ({error}); write the schema as text") from error
