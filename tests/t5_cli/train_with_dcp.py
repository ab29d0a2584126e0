"""A training loop as people write them: it reads files, saves with torch.distributed.checkpoint and keeps the last two.

    python train_with_dcp.py MOUNT CHECKPOINTS STEPS EVERY [CHECKPOINT TO RESUME FROM]

Prints one JSON line per step: [step, digest of what its ranks read]. Nothing here tells the lake anything.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from stepfs import StreamState

WORLD = 2


def main(mount: Path, checkpoints: Path, steps: int, every: int, resume: str | None) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stream = StreamState.of_mount(mount, world=WORLD)
    if resume is not None:
        state = {"model": model.state_dict(), "stream": stream}
        dcp.load(state, checkpoint_id=resume, no_dist=True)  # type: ignore[attr-defined]
        model.load_state_dict(state["model"])
    for step in range(stream.next_step, steps):
        files = [mount / f"step-{step:09d}" / f"rank-{rank:05d}.bin" for rank in range(WORLD)]
        data = b"".join(file.read_bytes() for file in files)
        batch = torch.frombuffer(bytearray(data[: len(data) // 4 * 4]), dtype=torch.uint8).float().view(-1, 4)
        loss = model(batch / 255).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stream.next_step = step + 1
        print(json.dumps([step, hashlib.sha256(data).hexdigest()]), flush=True)  # noqa: T201 - the test reads it
        if (step + 1) % every == 0 and resume is None:
            save(model, stream, checkpoints, every)


def save(model: torch.nn.Module, stream: StreamState, checkpoints: Path, every: int) -> None:
    path = checkpoints / f"step-{stream.next_step}"
    dcp.save({"model": model.state_dict(), "stream": stream}, checkpoint_id=path, no_dist=True)  # type: ignore[attr-defined]
    shutil.rmtree(checkpoints / f"step-{stream.next_step - 2 * every}", ignore_errors=True)


if __name__ == "__main__":
    where, kept, count, interval, *rest = sys.argv[1:]
    main(Path(where), Path(kept), int(count), int(interval), rest[0] if rest else None)
