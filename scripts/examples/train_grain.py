"""Batches for JAX: Grain takes a `StepDataset` as its data source, shuffles it, and reads it in processes of its own.

    python train_grain.py LAKE STATE STOP        # RANK and WORLD_SIZE as a launcher sets them

The state is one integer, so another number of processes goes on where this one stood; Grain's own `get_state` works,
too, for as many as before. Prints `step N CRC` for each micro-batch, and needs no torch but to read `.pt`.
"""

import os
import sys
import zlib
from pathlib import Path

import grain
import numpy as np

from stepfs import StepDataset


def main(url, state, stop):
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    start = int(state.read_text()) if state.exists() else 0
    source = StepDataset(url, rank=rank, mesh=f"dp={world}", start=start, stop=stop)
    steps = grain.MapDataset.source(source)  # .shuffle(seed=0) draws another order
    batches = steps.to_iter_dataset().mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=2))
    for step, micro_batches in enumerate(batches, start):
        for batch in micro_batches:
            print(f"step {step} {zlib.crc32(np.asarray(batch['input_ids']).tobytes()):08x}", flush=True)
        if rank == 0:  # with the weights, in a job's checkpoint
            Path(f"{state}.new").write_text(str(step + 1))
            Path(f"{state}.new").rename(state)


if __name__ == "__main__":  # Grain's workers are spawned
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
