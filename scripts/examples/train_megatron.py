"""Micro-batches for Megatron-LM and Megatron-Bridge, which pass them through: `--dataloader-type external`.

    python train_megatron.py LAKE STATE STOP        # RANK and WORLD_SIZE as a launcher sets them

There, the provider below is what `pretrain` gets, and `STATE` is `consumed_train_samples // global_batch_size`; set
the number of micro-batches to those of a rank. With context parallelism each rank takes its pieces of every document of
a plan with `pack: {align: mesh}`. Prints `step N CRC` for each micro-batch.
"""

import os
import sys
import zlib
from pathlib import Path

from stepfs import StepDataset
from stepfs.torch import context_parallel_part


def micro_batches(url, start, stop, *, dp_rank, dp, cp_rank=0, cp=1):
    """(step, what `get_batch` returns) of one data rank, in the order in which it accumulates gradients."""
    dataset = StepDataset(url, rank=dp_rank, mesh=f"dp={dp}", start=start, stop=stop, iterable=True)
    for step, batches in enumerate(dataset, start):
        for batch in batches:
            part = batch if cp == 1 else context_parallel_part(batch, cp_rank, cp)
            yield (
                step,
                {
                    "tokens": part["input_ids"],
                    "labels": part["labels"].clamp(min=0),
                    "loss_mask": (part["labels"] >= 0).float(),
                    "position_ids": part["position_ids"],
                    "cu_seqlens": batch.get("cu_seqlens_true", batch["cu_seqlens"]),
                    "cu_seqlens_padded": batch["cu_seqlens"],
                    "max_seqlen": batch["cu_seqlens"].diff().max(),
                },
            )


class Batches:
    """An iterable of micro-batches; in Megatron all ranks build it: `provider.is_distributed = True`."""

    def __init__(self, url, start, **place):
        self.url, self.start, self.place = url, start, place

    def __iter__(self):
        return (batch for _, batch in micro_batches(self.url, self.start, None, **self.place))


def main(url, state, stop):
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    start = int(state.read_text()) if state.exists() else 0
    for step, batch in micro_batches(url, start, stop, dp_rank=rank, dp=world):
        if rank == 0 and step > start:  # where Megatron counts the samples that it has consumed
            Path(f"{state}.new").write_text(str(step))
            Path(f"{state}.new").rename(state)
        print(f"step {step} {zlib.crc32(batch['tokens'].numpy().tobytes()):08x}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
