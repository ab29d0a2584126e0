"""A training job of as many processes as its mesh has ranks, which never names its rank in the data or their number.

    python train_elastic.py MOUNT|LAKE CHECKPOINTS STOP dp=2,cp=2,tp=2

Reads files of a mount by global rank, or a lake by `StepDataset`; accumulates its micro-batches in fp64, where each
context-parallel rank looks at its part of every row; saves with DCP after every second step, and goes on behind the newest
checkpoint. Prints one JSON line per step: [step, loss of the global batch, digest of its rows in order].
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from stepfs import Lake, StepDataset, StreamState
from stepfs.torch import coordinates

EVERY = 2
Batch = dict[str, Any]


def main(source: str, checkpoints: Path, stop: int, mesh: str) -> None:
    sizes = {name: int(size) for name, size in (each.split("=") for each in mesh.split(","))}
    world = torch.Size(sizes.values()).numel()
    meeting = checkpoints / f"meeting-{os.getpid()}"
    torch.multiprocessing.start_processes(  # fork: importing torch in each would take most of the time
        rank_of_job, (world, meeting, source, checkpoints, stop, sizes), nprocs=world, start_method="fork"
    )


def rank_of_job(
    rank: int, world: int, meeting: Path, source: str, checkpoints: Path, stop: int, sizes: dict[str, int]
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    train(source, checkpoints, stop, mesh)
    dist.destroy_process_group()


def train(source: str, checkpoints: Path, stop: int, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(258, 8), nn.Linear(8, 258)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stream = position(source)
    if found := sorted(path.parent for path in checkpoints.glob("step-*/.metadata")):
        state = {"model": model.state_dict(), "stream": stream}
        dcp.load(state, checkpoint_id=found[-1])
        model.load_state_dict(state["model"])
    for step, batches in enumerate(steps_of(source, stream.next_step, stop, mesh), stream.next_step):
        loss = backward(model, batches, mesh)
        optimizer.step()
        optimizer.zero_grad()
        stream.next_step = step + 1
        digest = global_batch(batches, mesh)
        if dist.get_rank() == 0:
            print(json.dumps([step, loss, digest]), flush=True)  # noqa: T201 - the test reads it
        if stream.next_step % EVERY == 0:
            state = {"model": model.state_dict(), "stream": stream}
            dcp.save(state, checkpoint_id=checkpoints / f"step-{stream.next_step:04d}")


def position(source: str) -> StreamState:
    if "://" not in source:
        return StreamState.of_mount(source, world=dist.get_world_size())
    with Lake(source) as lake:
        return StreamState.of_lake(lake)


def steps_of(source: str, start: int, stop: int, mesh: DeviceMesh) -> Iterator[list[Batch]]:
    if "://" in source:
        rank, ranks = coordinates(mesh)
        dataset = StepDataset(source, rank=rank, mesh=f"dp={ranks}", start=start, stop=stop, memory="192M")
        yield from (dataset[item] for item in range(len(dataset)))  # type: ignore[index,arg-type]
        dataset.lake.close()
        return
    for step in range(start, stop):
        files = sorted(Path(source, f"step-{step:09d}").glob(f"rank-{dist.get_rank():05d}.*"))
        yield [load_file(file) for file in files]


def backward(model: nn.Module, batches: list[Batch], mesh: DeviceMesh) -> float:
    """Gradients and loss of the global batch, divided by its tokens."""
    names, here = mesh.mesh_dim_names or (), mesh.get_coordinate() or []
    cp, part = mesh["cp"].size(), here[names.index("cp")]
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        ids, labels = (batch[name].chunk(cp, dim=1)[part].flatten() for name in ("input_ids", "labels"))
        loss = nn.functional.cross_entropy(model(ids), labels, reduction="sum")
        loss.backward()
        sums += torch.tensor([loss.item(), (labels != -100).sum().item()], dtype=torch.float64)
    for name in ("dp", "cp"):
        dist.all_reduce(sums, group=mesh[name].get_group())
    for parameter in model.parameters():
        gradient: Tensor | None = parameter.grad
        assert gradient is not None
        for name in ("dp", "cp"):
            dist.all_reduce(gradient, group=mesh[name].get_group())
        gradient /= sums[1]
    return float(sums[0] / sums[1])


def global_batch(batches: list[Batch], mesh: DeviceMesh) -> str:
    """The digest of all rows of the step, in the order of data ranks; peers have read the same."""
    own = coordinates(mesh)[0], [row for batch in batches for row in batch["input_ids"].tolist()]
    everybody: list[tuple[int, list[Any]]] = [own] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    of_data: dict[int, list[Any]] = {}
    for data, rows in everybody:
        assert of_data.setdefault(data, rows) == rows, "peers"
    assert len(of_data) == coordinates(mesh)[1]
    return hashlib.sha256(json.dumps([row for data in sorted(of_data) for row in of_data[data]]).encode()).hexdigest()


if __name__ == "__main__":
    where, kept, count, shape = sys.argv[1:]
    main(where, Path(kept), int(count), shape)
