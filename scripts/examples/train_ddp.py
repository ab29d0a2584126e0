"""Train with DDP on a mount, save with torch.distributed.checkpoint (DCP), and continue exactly after kill -9.

    stepfs mount LAKE MOUNT --group pretrain --wait 300
    torchrun --standalone --nproc-per-node 2 train_ddp.py MOUNT CHECKPOINTS STEPS

Every rank reads its own file of each step. Every fourth step the job saves a checkpoint, then records it in the lake:
from then on `stepfs reclaim` deletes nothing that this checkpoint needs. The two newest are kept. The same command
after any ending continues behind the newest checkpoint that is complete, with the same losses as if nothing had ended.

Prints one line per step, `step N loss X`, with all digits of the loss.
"""

import gc
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from stepfs import CheckpointHook, StreamState

EVERY, KEEP = 4, 2


def complete(checkpoints):
    """The complete checkpoints, oldest first: DCP writes `.metadata` last, so one that was interrupted has none."""
    return [path.parent for path in sorted(checkpoints.glob("step-*/.metadata"))]


def train(mount, checkpoints, stop):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(258, 32), nn.Linear(32, 258)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = StreamState.of_mount(mount, world=world)  # which lake, and the next step
    record = CheckpointHook(mount, keep=KEEP)  # for the group that the mount names

    if found := complete(checkpoints):
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "stream": stream}, checkpoint_id=found[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        record.resumed(stream.next_step)

    for step in range(stream.next_step, stop):
        batch = load_file(mount / f"step-{step:09d}" / f"rank-{rank:05d}.safetensors")
        logits = model(batch["input_ids"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stream.next_step = step + 1

        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item()!r}", flush=True)
        if stream.next_step % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "stream": stream}
            dcp.save(state, checkpoint_id=checkpoints / f"step-{stream.next_step:09d}")
            record(stream.next_step)  # every rank may call it; rank 0 writes
            if rank == 0:
                for old in complete(checkpoints)[:-KEEP]:
                    shutil.rmtree(old)


if __name__ == "__main__":
    dist.init_process_group("gloo")  # "nccl" on GPUs
    train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    gc.collect()  # the model goes before the group: gloo may wait for ever if DDP holds it last (pytorch 56297)
    dist.destroy_process_group()
