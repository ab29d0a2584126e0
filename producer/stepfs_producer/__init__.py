"""Writing to a lake: producers that commit global steps exactly once. `COMMIT.md` describes the protocol.

`append` and `flush` raise `Fenced` and `Sealed`; a process that ends by them should exit with their `exit_code`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepfs import __version__
from stepfs.errors import FencedError as Fenced
from stepfs.errors import SealedError as Sealed

if TYPE_CHECKING:
    from stepfs_producer.producer import AsyncProducer
    from stepfs_producer.sync import Producer

__all__ = ["AsyncProducer", "Fenced", "Producer", "Sealed", "__version__"]


def __getattr__(name: str) -> object:
    # At their first use: workers of a planned run import this package, and commit nothing.
    if name == "AsyncProducer":
        from stepfs_producer.producer import AsyncProducer  # noqa: PLC0415

        return AsyncProducer
    if name == "Producer":
        from stepfs_producer.sync import Producer  # noqa: PLC0415

        return Producer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
