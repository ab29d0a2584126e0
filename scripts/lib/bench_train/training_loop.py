"""A plain training loop in a fresh process; prints how long each step waited for its data, as JSON.

The order comes as JSON in the only argument. `side` 'mount': an ordinary map-style dataset over `paths`; 'colocated':
the same tensors made by the workers of the DataLoader from the raw samples in `directory`. Computing is a sleep, as long
as an accelerator of that appetite would take.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bench_train.preprocessing import WORKS, Work


class Steps(Dataset[torch.Tensor]):
    """One file per step."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.from_numpy(np.load(self._paths[number]))


class Samples(Dataset[torch.Tensor]):
    """One preprocessed sample at a time."""

    def __init__(self, work: Work, count: int) -> None:
        self._work = work
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._work.sample(number)


def main() -> None:
    order = json.loads(sys.argv[1])
    workers, batch = order["workers"], order["batch"]
    if order["side"] == "mount":
        loader = DataLoader(Steps(order["paths"]), batch_size=None, num_workers=workers)
    else:
        work = WORKS[order["work"]](Path(order["directory"]))
        loader = DataLoader(Samples(work, order["steps"] * batch), batch_size=batch, num_workers=workers)
    compute_s, stop = order["compute_s"], time.monotonic() + order["seconds_max"]
    waits, totals = [], []
    batches = iter(loader)
    for number in range(order["steps"]):
        began = time.monotonic()
        tensor = next(batches)
        waits.append(time.monotonic() - began)
        assert tensor.shape[0] == batch
        time.sleep(compute_s)
        totals.append(time.monotonic() - began)
        if time.monotonic() > stop and number > order["warm"]:
            break
    print(json.dumps({"waits": waits[order["warm"] :], "totals": totals[order["warm"] :]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
