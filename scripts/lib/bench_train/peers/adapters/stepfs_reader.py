"""stepfs without a mount: `StepDataset`, map-style, in the workers of the DataLoader; the state is `StreamState`'s."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from bench_train.peers import samples
from bench_train.peers.adapters.stepfs_mount import write
from bench_train.peers.job import Batch, Order

if TYPE_CHECKING:
    from bench_train.peers.job import Stream

__all__ = ["imports", "train", "write"]


def imports() -> None:
    import torch.utils.data  # noqa: F401, PLC0415 - writers need none of it

    import stepfs.training  # noqa: F401, PLC0415 - absent where other peers run


class Reader:
    """A `Stream`."""

    def __init__(self, order: Order, state: Any) -> None:
        from stepfs import Lake, StreamState  # noqa: PLC0415

        self._order = order
        url, endpoint_url = f"s3://{order.bucket}/{order.place}", os.environ["AWS_ENDPOINT_URL_S3"]
        self._lake = Lake(url, ranks=0, endpoint_url=endpoint_url)
        self._state = StreamState.of_lake(self._lake)
        if state is not None:
            self._state.load_state_dict(state)

    def batches(self) -> Iterator[Batch]:
        from bench_train.peers.adapters.whole_batches import loader  # noqa: PLC0415 - torch
        from stepfs import StepDataset  # noqa: PLC0415

        first, stop = self._state.next_step, self._order.data.batches
        decode = partial(samples.decoded_file, self._order.data)
        dataset: Any = StepDataset(self._lake, rank=0, start=first, stop=stop, decode=decode)
        for step, batch in zip(range(first, stop), loader(dataset, self._order), strict=True):
            self._state.next_step = step + 1
            yield batch

    def state(self) -> object:
        return self._state.state_dict()


def train(order: Order, state: Any) -> Stream:
    return Reader(order, state)
