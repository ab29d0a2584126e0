"""The samples of the job, made and decoded the same way for every peer.

Text: 4,096 packed tokens, int32, whose first token is the sample's id. Images: a JPEG and its id. Whole batches, for
peers that read files of a batch each, are an `.npy` array and a `.tar` of JPEGs.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench_train.peers.job import TEXT, Batch, Data, Order

if TYPE_CHECKING:
    import torch

TOKENS = 4096
_VOCABULARY = 8192
_DISTINCT = 64  # samples repeat, their ids do not: the store does not know
_IMAGE_SIZE = (320, 240)
_JPEG_QUALITY = 85
_UPLOADS = 8


def make_corpus(data: Data) -> None:
    """Writes the raw material of samples into `data.directory`."""
    from PIL import Image  # noqa: PLC0415 - text needs none

    directory, draw = Path(data.directory), np.random.default_rng(5)
    if data.kind == TEXT:
        np.save(directory / "tokens.npy", draw.integers(0, _VOCABULARY, (_DISTINCT, TOKENS), dtype=np.int32))
        return
    for number in range(_DISTINCT):
        coarse = draw.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize(_IMAGE_SIZE, Image.Resampling.BICUBIC)
        grain = draw.integers(0, 24, (*_IMAGE_SIZE[::-1], 3), dtype=np.uint8)
        Image.fromarray(np.asarray(image) // 2 + grain).save(directory / f"{number}.jpg", "JPEG", quality=_JPEG_QUALITY)


@cache
def _tokens(directory: str) -> NDArray[np.int32]:
    found: NDArray[np.int32] = np.load(Path(directory) / "tokens.npy")
    return found


@cache
def _jpeg(directory: str, number: int) -> bytes:
    return (Path(directory) / f"{number}.jpg").read_bytes()


def tokens(data: Data, number: int) -> NDArray[np.int32]:
    """Sample `number` of text."""
    found: NDArray[np.int32] = _tokens(data.directory)[number % _DISTINCT].copy()
    found[0] = number
    return found


def jpeg(data: Data, number: int) -> bytes:
    """Sample `number` of images."""
    return _jpeg(data.directory, number % _DISTINCT)


def sample(data: Data, number: int) -> dict[str, object]:
    """A sample as libraries that store samples take it: a dict of fields."""
    if data.kind == TEXT:
        return {"tokens": tokens(data, number)}
    return {"id": number, "jpeg": jpeg(data, number)}


def ext(data: Data) -> str:
    """Of a file that holds one batch."""
    return ".npy" if data.kind == TEXT else ".tar"


def tar(data: Data, numbers: Iterable[int]) -> bytes:
    """A WebDataset shard of these samples."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in numbers:
            if data.kind == TEXT:
                array = io.BytesIO()
                np.save(array, tokens(data, number))
                name, body = f"{number:08d}.npy", array.getvalue()
            else:
                name, body = f"{number:08d}.jpg", jpeg(data, number)
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return out.getvalue()


def batch_file(data: Data, number: int) -> bytes:
    """Batch `number` as one file."""
    numbers = range(number * data.batch, (number + 1) * data.batch)
    if data.kind != TEXT:
        return tar(data, numbers)
    out = io.BytesIO()
    np.save(out, np.stack([tokens(data, each) for each in numbers]))
    return out.getvalue()


def decoded_sample(fields: Mapping[str, Any]) -> Batch:
    """One stored sample, decoded: (id, content), for a DataLoader to collate."""
    import torch  # noqa: PLC0415 - two seconds, and writers need none of it

    if "tokens" in fields:
        array = np.asarray(fields["tokens"])
        return torch.tensor(int(array[0])), torch.from_numpy(array)
    number = int(fields["id"])
    return torch.tensor(number), decoded_jpeg(fields["jpeg"], number)


def decoded_jpeg(body: bytes, number: int) -> torch.Tensor:
    from bench_train.augment import augmented  # noqa: PLC0415 - torch

    return augmented(io.BytesIO(body), number)


def decoded_file(data: Data, file: str | bytes | memoryview) -> Batch:
    """The batch in a file of `batch_file`, by its path or its bytes."""
    import torch  # noqa: PLC0415

    if data.kind == TEXT:
        array = np.load(file if isinstance(file, str) else io.BytesIO(file))
        return torch.from_numpy(array[:, 0].astype(np.int64)), torch.from_numpy(array)
    source = Path(file).open("rb") if isinstance(file, str) else io.BytesIO(file)  # noqa: SIM115
    with source, tarfile.open(fileobj=source, mode="r:") as archive:
        members = [(int(entry.name.partition(".")[0]), archive.extractfile(entry)) for entry in archive]
        pixels = [decoded_jpeg(body.read(), number) for number, body in members if body is not None]
    return torch.tensor([number for number, _ in members]), torch.stack(pixels)


def upload(order: Order, bodies: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
    """Objects under `order.place`, several at a time."""
    import boto3  # noqa: PLC0415 - half a second
    from botocore.config import Config  # noqa: PLC0415

    client = boto3.client("s3", config=Config(max_pool_connections=_UPLOADS, s3={"addressing_style": "path"}))

    def put(item: tuple[str, Callable[[], bytes]]) -> None:
        client.put_object(Bucket=order.bucket, Key=f"{order.place}/{item[0]}", Body=item[1]())

    with ThreadPoolExecutor(_UPLOADS) as pool:
        list(pool.map(put, bodies))


def upload_directory(order: Order, directory: Path) -> None:
    """All files below a directory."""
    files: Sequence[Path] = sorted(path for path in directory.rglob("*") if path.is_file())
    upload(order, ((str(path.relative_to(directory)), path.read_bytes) for path in files))
