"""Functions that need torch, or go with it; torch is imported only when one is called.

Public: `dump`, `coordinates`, `micro_batches`.
"""

from stepfs.torch.device_mesh import coordinates
from stepfs.torch.save import dump
from stepfs.torch.split import micro_batches

__all__ = ["coordinates", "dump", "micro_batches"]
