"""Pytest plugin of `scripts/test`: no process is left alone with a long test at the end.

`--dist worksteal` gives each process one stretch of the tests, in order, and moves what is left at the end of a
stretch to an idle process. So the long tests, those with a timeout of their own, begin the stretches, those of a file in
one of them: they share what the file has made once.
"""

from __future__ import annotations

from itertools import groupby

import pytest


@pytest.hookimpl(trylast=True)  # after what is not to run was left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    processes = int(getattr(config, "workerinput", {}).get("workercount", 1))
    if processes == 1:
        return
    long = [item for item in items if item.get_closest_marker("timeout")]
    short = [item for item in items if not item.get_closest_marker("timeout")]
    heads: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for _, tests in groupby(long, key=lambda item: item.path):
        min(heads, key=len).extend(tests)
    ordered: list[pytest.Item] = []
    left = len(items)
    for process in range(processes):
        size = left // (processes - process)  # as worksteal deals them out
        left -= size
        mine = heads[process][:size]
        rest = size - len(mine)
        ordered += [*mine, *short[:rest]]
        del short[:rest]
    placed = set(map(id, ordered))
    items[:] = [*ordered, *(item for item in items if id(item) not in placed)]
