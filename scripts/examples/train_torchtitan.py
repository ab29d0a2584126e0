"""A loader for torchtitan: its trainer saves the loader's state beside the weights, and may come back with another size.

    python train_torchtitan.py LAKE STATE STOP      # RANK and WORLD_SIZE as a launcher sets them

In torchtitan, name a config of your own whose `dataloader` is `LakeLoader.Config(dataset_path="s3://…")`. torchtitan's
own loader refuses another number of data ranks; this one has a single integer as its state. Prints `step N CRC` for
each micro-batch.
"""

import os
import sys
import zlib
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import BaseDataLoader

from stepfs import StepDataset


class LakeLoader(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        stop: int | None = None

    def __init__(self, config, *, dp_world_size, dp_rank, **_):
        self.config, self.rank, self.world, self.next_step = config, dp_rank, dp_world_size, 0

    def __iter__(self):
        options = {"rank": self.rank, "mesh": f"dp={self.world}", "stop": self.config.stop, "iterable": True}
        for batches in StepDataset(self.config.dataset_path, start=self.next_step, **options):
            for number, batch in enumerate(batches, 1):
                self.next_step += number == len(batches)
                yield {"input": batch["input_ids"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self):
        return {"next_step": torch.tensor(self.next_step)}

    def load_state_dict(self, state):
        self.next_step = int(state["next_step"])


if __name__ == "__main__":
    url, state, stop = sys.argv[1:]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    loader = LakeLoader(LakeLoader.Config(dataset_path=url, stop=int(stop)), dp_world_size=world, dp_rank=rank)
    if os.path.exists(f"{state}/.metadata"):
        dcp.load({"dataloader": loader}, checkpoint_id=state)
    before = loader.next_step
    for inputs, _labels in loader:
        print(f"step {before} {zlib.crc32(inputs['input'].numpy().tobytes()):08x}", flush=True)
        if loader.next_step > before:  # as torchtitan's trainer does, every so many steps
            dcp.save({"dataloader": loader}, checkpoint_id=state)
            before = loader.next_step
