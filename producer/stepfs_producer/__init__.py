"""Writing to a lake: producers that commit global steps exactly once. `COMMIT.md` describes the protocol.

`append` and `flush` raise `Fenced` and `Sealed`; a process that ends by them should exit with their `exit_code`.
"""

from __future__ import annotations

from stepfs import __version__
from stepfs.errors import FencedError as Fenced
from stepfs.errors import SealedError as Sealed
from stepfs_producer.producer import AsyncProducer
from stepfs_producer.sync import Producer

__all__ = ["AsyncProducer", "Fenced", "Producer", "Sealed", "__version__"]
