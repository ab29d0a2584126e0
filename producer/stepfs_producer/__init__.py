"""Writing to a lake: producers that commit global steps exactly once. `COMMIT.md` is the prose of this package."""

from __future__ import annotations

from stepfs_producer.producer import AsyncProducer
from stepfs_producer.sync import Producer

__all__ = ["AsyncProducer", "Producer"]
