"""MosaicML Streaming: MDS shards of its default size, `StreamingDataLoader.state_dict` and `load_state_dict`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench_train.peers import samples
from bench_train.peers.job import TEXT, LoaderStream, Order


def imports() -> None:
    """Torchvision's wheel expects a CUDA build of torch: beside another its operators are missing, and the import of its
    Python part, of which Streaming needs one base class, fails where it describes them. So their names are made known.
    """
    import torch  # noqa: PLC0415

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import streaming  # type: ignore[import-not-found]  # noqa: F401, PLC0415


def write(order: Order) -> None:
    imports()
    from streaming import MDSWriter  # noqa: PLC0415

    columns = (
        {"tokens": f"ndarray:int32:{samples.TOKENS}"} if order.data.kind == TEXT else {"id": "int", "jpeg": "bytes"}
    )
    with MDSWriter(out=order.cache, columns=columns) as out:
        for number in range(order.data.samples):
            out.write(samples.sample(order.data, number))
    samples.upload_directory(order, Path(order.cache))


def train(order: Order, state: Any) -> LoaderStream:
    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL_S3"]
    from streaming import StreamingDataLoader, StreamingDataset  # noqa: PLC0415
    from streaming.base.util import (  # type: ignore[import-not-found]  # noqa: PLC0415
        clean_stale_shared_memory,
    )

    class Decoded(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return samples.decoded_sample(super().__getitem__(at))

    clean_stale_shared_memory()  # as its documents tell after a run that was killed
    dataset = Decoded(
        remote=f"s3://{order.bucket}/{order.place}",
        local=order.cache,
        shuffle=False,
        batch_size=order.data.batch,
    )
    loader = StreamingDataLoader(dataset, batch_size=order.data.batch, num_workers=order.workers)
    return LoaderStream(loader, state)
