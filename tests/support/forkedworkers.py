"""Workers of the plans that tests run in their own process: forked from one that is loaded, instead of started.

A worker takes a third of a second to import numpy and what tasks need; here its fork takes a hundredth. What it does is
the same. Tests of how workers start, die and end start `stepfs-produce`, whose workers are its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

_LOADED = ["_trio_parallel_workers", "stepfs_producer.payloads.encode", "stepfs_producer.transforms.records"]


@pytest.fixture(scope="module", autouse=True)
def forked_workers() -> Iterator[None]:
    """For every test of a module that imports this fixture. Nobody dies here, so no run needs a spare."""
    import trio_parallel  # noqa: PLC0415 - workers import this module

    from stepfs_producer.engine import local  # noqa: PLC0415

    start = trio_parallel.open_worker_context

    def forking(*, init: object, **options: Any) -> Any:
        del init  # it watches the process that runs the plan, which is not the parent here
        kind = trio_parallel.WorkerType.FORKSERVER
        return start(init=partial(_begin, dict(os.environ)), worker_type=kind, **options)

    multiprocessing.set_forkserver_preload(_LOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "SPARES", 0)
        patch.setattr(trio_parallel, "open_worker_context", forking)
        yield


def _begin(environment: dict[str, str]) -> bool:
    from stepfs_producer.engine.worker import begin  # noqa: PLC0415

    os.environ.clear()  # the server has that of the first test
    os.environ.update(environment)
    return begin(os.getppid())
