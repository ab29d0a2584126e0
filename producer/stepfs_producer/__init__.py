"""Writing to a lake: producers that commit global steps exactly once. `COMMIT.md` describes the protocol.

    from stepfs_producer import Producer
    from stepfs_producer import Jsonl, Mix, Output, Plan     # a plan of many sources; needs the extra `produce`
    from stepfs_producer import Bad                          # the value that your `decode` returns for a bad record

`append` and `flush` raise `Fenced` and `Sealed`; a process that ends by them should exit with their `exit_code`. Public
are the names below; all modules in this package may change with any version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from stepfs import __version__
from stepfs.errors import FencedError as Fenced
from stepfs.errors import SealedError as Sealed

if TYPE_CHECKING:
    from stepfs_producer.commit.producer import AsyncProducer, Producer
    from stepfs_producer.plan.parts import Balance, Cost, Mix, Output, Pack, Stage, Until
    from stepfs_producer.plan.sources import (
        Chat,
        Column,
        Defaults,
        Fim,
        Images,
        Jsonl,
        Megatron,
        OnError,
        Pair,
        Parquet,
        Shuffle,
        Source,
        Table,
        Text,
        Tokenizer,
    )
    from stepfs_producer.plan.values import PlanError
    from stepfs_producer.plans import Plan
    from stepfs_producer.sources.record import Bad

__all__ = [
    "AsyncProducer", "Bad", "Balance", "Chat", "Column", "Cost", "Defaults", "Fenced", "Fim", "Images", "Jsonl", "Megatron", "Mix",
    "OnError", "Output", "Pack", "Pair", "Parquet", "Plan", "PlanError", "Producer", "Sealed", "Shuffle", "Source", "Stage", "Table",
    "Text", "Tokenizer", "Until", "__version__",
]  # fmt: skip

_HOMES = {
    "AsyncProducer": "stepfs_producer.commit.producer",
    "Bad": "stepfs_producer.sources.record",
    "Plan": "stepfs_producer.plans",
    "PlanError": "stepfs_producer.plan.values",
    "Producer": "stepfs_producer.commit.producer",
    **dict.fromkeys(("Balance", "Cost", "Mix", "Output", "Pack", "Stage", "Until"), "stepfs_producer.plan.parts"),
}


def __getattr__(name: str) -> object:
    # At their first use: workers of a planned run import this package, and commit nothing.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stepfs_producer.plan.packages import plan_packages  # noqa: PLC0415

    with plan_packages():
        return getattr(import_module(_HOMES.get(name, "stepfs_producer.plan.sources")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
