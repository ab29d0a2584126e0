"""stepfs, mounted: a step is a file, the dataset is map-style over step numbers, the state is `StreamState`'s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_train.peers import samples
from bench_train.peers.job import Batch, Order


def imports() -> None:
    import torch.utils.data  # noqa: F401, PLC0415 - writers need none of it

    import stepfs.training  # noqa: F401, PLC0415 - absent where other peers run


def write(order: Order) -> None:
    import trio  # noqa: PLC0415 - absent where other peers run

    from stepfs.lake.identity import create_lake  # noqa: PLC0415
    from stepfs.store.opening import open_store  # noqa: PLC0415
    from stepfs_producer import Producer  # noqa: PLC0415

    url = f"s3://{order.bucket}/{order.place}"

    async def create() -> None:
        store = open_store(url)
        await create_lake(store, slices=1, ext=samples.ext(order.data))
        await store.aclose()

    trio.run(create)
    with Producer(url, producer_id="bench") as producer:
        for number in range(order.data.batches):
            producer.append([samples.batch_file(order.data, number)], position=number)


class Mounted:
    """A `Stream`."""

    def __init__(self, order: Order, state: Any) -> None:
        from stepfs import StreamState  # noqa: PLC0415

        self._order = order
        self._state = StreamState.of_mount(order.mount, world=1)
        if state is not None:
            self._state.load_state_dict(state)

    def paths(self) -> dict[int, str]:
        """Of the steps that are not trained yet."""
        root, name = Path(self._order.mount), f"rank-00000{samples.ext(self._order.data)}"
        steps = range(self._state.next_step, self._order.data.batches)
        return {step: str(root / f"step-{step:09d}" / name) for step in steps}

    def batches(self) -> Iterator[Batch]:
        from bench_train.peers.adapters.whole_batches import Files, loader  # noqa: PLC0415 - torch

        paths = self.paths()
        files = Files(self._order.data, list(paths.values()))
        for step, batch in zip(paths, loader(files, self._order), strict=True):
            self.trained(step)
            yield batch

    def trained(self, step: int) -> None:
        self._state.next_step = step + 1

    def state(self) -> object:
        return self._state.state_dict()


def train(order: Order, state: Any) -> Mounted:
    return Mounted(order, state)
