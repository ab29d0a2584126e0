"""For peers that read one object or file per batch: a map-style dataset, whose order is the sampler's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.utils.data import DataLoader, Dataset

from bench_train.peers import samples
from bench_train.peers.job import Batch, Data, Order


class Files(Dataset[Batch]):
    """A batch per file."""

    def __init__(self, data: Data, paths: Sequence[str]) -> None:
        self._data = data
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> Batch:
        return samples.decoded_file(self._data, self._paths[number])


def loader(dataset: Dataset[Batch], order: Order, sampler: Sequence[int] | None = None) -> Iterator[Batch]:
    """An ordinary DataLoader; the sampler says which batches, else all."""
    return iter(DataLoader(dataset, batch_size=None, sampler=sampler, num_workers=order.workers))


class Counted:
    """A `Stream` over a map-style dataset of batches: its state is the number of batches, as a sampler's would be."""

    def __init__(self, dataset: Dataset[Batch], order: Order, state: int | None) -> None:
        self._dataset = dataset
        self._order = order
        self._next = state or 0

    def batches(self) -> Iterator[Batch]:
        for batch in loader(self._dataset, self._order, range(self._next, self._order.data.batches)):
            self._next += 1
            yield batch

    def state(self) -> int:
        return self._next
