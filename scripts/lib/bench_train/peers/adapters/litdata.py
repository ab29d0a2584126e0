"""LitData: chunks of 64 MB made by `optimize`, `StreamingDataLoader.state_dict` and `load_state_dict`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from bench_train.peers import samples
from bench_train.peers.job import LoaderStream, Order


def imports() -> None:
    from litdata.streaming import downloader  # type: ignore[import-not-found]  # noqa: PLC0415

    # What it passes to obstore, through which it gets chunks, cannot be set from outside and refuses stores without TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # noqa: SLF001


def write(order: Order) -> None:
    for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
        os.environ[name] = f"{order.cache}-of-optimize/{name}"  # not in /tmp, for all runs together
    from litdata import optimize  # type: ignore[import-not-found]  # noqa: PLC0415

    optimize(
        fn=partial(samples.sample, order.data),
        inputs=list(range(order.data.samples)),
        output_dir=order.cache,
        num_workers=1,
        chunk_bytes="64MB",
    )
    samples.upload_directory(order, Path(order.cache))


def train(order: Order, state: Any) -> LoaderStream:
    from litdata import StreamingDataLoader, StreamingDataset  # noqa: PLC0415

    class Decoded(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return samples.decoded_sample(super().__getitem__(at))

    dataset = Decoded(
        f"s3://{order.bucket}/{order.place}",
        cache_dir=order.cache,
        shuffle=False,
        drop_last=False,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL_S3"]},
    )
    loader = StreamingDataLoader(dataset, batch_size=order.data.batch, num_workers=order.workers)
    return LoaderStream(loader, state)
