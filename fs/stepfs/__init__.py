"""stepfs: transactional global training batches in object storage, read as files.

Public are the names below, and those that the modules `announce`, `errors`, `payload` and `torch` define. All other
modules may change with any version. A name is imported when it is first used: `import stepfs` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stepfs import announce as announce
    from stepfs import errors as errors
    from stepfs import torch as torch
    from stepfs.reader.dataset import StepDataset as StepDataset
    from stepfs.reader.lake import Lake as Lake
    from stepfs.reader.tracing import trace as trace
    from stepfs.shuffled_steps import ShuffledSteps as ShuffledSteps
    from stepfs.training import CheckpointHook as CheckpointHook
    from stepfs.training import StreamState as StreamState

__version__ = "0.1.0"
__all__ = [
    "CheckpointHook", "Lake", "ShuffledSteps", "StepDataset", "StreamState", "__version__", "trace",
]  # fmt: skip

_MODULES: Final = frozenset(("announce", "errors", "torch"))  # not in a `*`: the user's `torch` is another one
_HOMES: Final = {
    "CheckpointHook": "stepfs.training",
    "Lake": "stepfs.reader.lake",
    "ShuffledSteps": "stepfs.shuffled_steps",
    "StepDataset": "stepfs.reader.dataset",
    "StreamState": "stepfs.training",
    "trace": "stepfs.reader.tracing",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"stepfs.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
