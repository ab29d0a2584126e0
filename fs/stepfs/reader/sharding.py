"""A warning where a framework deals out what is one rank's already: each rank would train on a part of its own steps, or
on another rank's.

The frameworks do it from the outside, with samplers and loaders of theirs. So a data set and a sampler look who asks for
their length or their steps: once a pass, by names of code, and only in a job of several processes."""

import logging
import os
import sys
from types import FrameType
from typing import Final

_log = logging.getLogger("stepfs.reader")

_TORCH: Final = "pass no `DistributedSampler`; in Lightning `Trainer(use_distributed_sampler=False)`"
_ACCELERATE: Final = "in accelerate do not `prepare` the loader, only model and optimizer"
_SHARDERS: Final = {  # class of the code that asks: what to do
    "DistributedSampler": _TORCH,
    "DistributedSamplerWrapper": _TORCH,
    "UnrepeatedDistributedSampler": _TORCH,
    "_DatasetSamplerWrapper": _TORCH,
    "BatchSamplerShard": _ACCELERATE,
    "IterableDatasetShard": _ACCELERATE,
    "DataLoaderDispatcher": _ACCELERATE,
}
_told = False


def warn_if_sharded(ranks: int) -> None:
    """Warn, once in a process, if a framework's code that deals out data among processes is asking for that of one of
    `ranks` ranks. Steps of a single rank may be dealt out."""
    global _told  # noqa: PLW0603 - there is one process
    if _told or ranks < 2 or processes() < 2:
        return
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to see who asks
    while frame is not None:
        advice = _SHARDERS.get(frame.f_code.co_qualname.partition(".")[0])
        if advice is not None:
            _told = True
            _log.warning(
                "each rank's data is its own already, and a framework deals it out once more among %d processes: steps are "
                "left out, or come to other ranks; %s",
                processes(),
                advice,
            )
            return
        frame = frame.f_back


def processes() -> int:
    """The number of processes of the training job; 1 where there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isascii() and size.isdigit() else 1
