"""WebDataset over files of a mount: tar shards, split among workers, batched in them. It has no state."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench_train.peers import samples
from bench_train.peers.job import Batch, Order

if TYPE_CHECKING:
    from bench_train.peers.job import Batch

_SHARDS = 12  # at least one for each worker, and as many for each of 2, 3 and 4


def _names() -> list[str]:
    return [f"shard-{number:06d}.tar" for number in range(_SHARDS)]


def imports() -> None:
    import webdataset  # noqa: F401, PLC0415


def write(order: Order) -> None:
    """Into the mount if there is one to write through, else as plain objects."""
    count = -(-order.data.samples // _SHARDS)
    parts = [range(start, min(start + count, order.data.samples)) for start in range(0, order.data.samples, count)]
    shards = [(name, partial(samples.tar, order.data, part)) for name, part in zip(_names(), parts, strict=True)]
    if not order.mount:
        samples.upload(order, shards)
        return
    directory = Path(order.mount) / order.place
    directory.mkdir(parents=True)
    for name, body in shards:
        (directory / name).write_bytes(body())


def _decoded(fields: dict[str, Any]) -> Any:
    if "npy" in fields:
        return samples.decoded_sample({"tokens": np.load(io.BytesIO(fields["npy"]))})
    return samples.decoded_sample({"id": fields["__key__"].rpartition("/")[2], "jpeg": fields["jpg"]})


class Shards:
    """A `Stream`."""

    def __init__(self, order: Order) -> None:
        import webdataset  # noqa: PLC0415

        directory = Path(order.mount) / order.place
        dataset = webdataset.WebDataset([str(directory / name) for name in _names()], shardshuffle=False)
        batched = dataset.map(_decoded).batched(order.data.batch)
        self._loader = webdataset.WebLoader(batched, batch_size=None, num_workers=order.workers)

    def batches(self) -> Iterator[Batch]:
        return iter(self._loader)

    def state(self) -> None:
        return None


def train(order: Order, state: Any) -> Shards:
    assert state is None
    return Shards(order)
