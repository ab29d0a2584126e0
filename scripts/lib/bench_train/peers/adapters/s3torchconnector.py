"""Amazon's S3 connector: `S3MapDataset` over objects of one batch each. It has no state; the order is the sampler's."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from bench_train.peers import samples
from bench_train.peers.job import Data, Order

if TYPE_CHECKING:
    from bench_train.peers.job import Stream


def _name(data: Data, number: int) -> str:
    return f"batch-{number:06d}{samples.ext(data)}"


def imports() -> None:
    import s3torchconnector  # type: ignore[import-not-found]  # noqa: F401, PLC0415


def write(order: Order) -> None:
    data = order.data
    numbers = range(data.batches)
    samples.upload(order, ((_name(data, each), partial(samples.batch_file, data, each)) for each in numbers))


def _decoded(data: Data, reader: Any) -> Any:
    return samples.decoded_file(data, reader.read())


def train(order: Order, state: Any) -> Stream:
    from s3torchconnector import (  # noqa: PLC0415
        S3ClientConfig,
        S3MapDataset,
    )

    from bench_train.peers.adapters.whole_batches import Counted  # noqa: PLC0415 - torch

    where = f"s3://{order.bucket}/{order.place}"
    dataset = S3MapDataset.from_objects(
        [f"{where}/{_name(order.data, number)}" for number in range(order.data.batches)],
        region=os.environ["AWS_DEFAULT_REGION"],
        endpoint=os.environ["AWS_ENDPOINT_URL_S3"],
        transform=partial(_decoded, order.data),
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return Counted(dataset, order, state)
