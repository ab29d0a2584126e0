"""Pytest plugin of `scripts/test`: no process is left alone with a long test at the end.

`--dist worksteal` gives each process one stretch of the tests, in order, and moves what is left at the end of a
stretch to whoever is idle. So the long tests, those with a timeout of their own, begin each stretch in turn.
"""

import pytest


@pytest.hookimpl(trylast=True)  # after what is not to run was left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    processes = int(getattr(config, "workerinput", {}).get("workercount", 1))
    if processes == 1:
        return
    long = [item for item in items if item.get_closest_marker("timeout")]
    short = [item for item in items if not item.get_closest_marker("timeout")]
    ordered: list[pytest.Item] = []
    left = len(items)
    for process in range(processes):
        size = left // (processes - process)  # as worksteal deals them out
        left -= size
        mine = long[process::processes][:size]
        rest = size - len(mine)
        ordered += [*mine, *short[:rest]]
        del short[:rest]
    placed = set(map(id, ordered))
    items[:] = [*ordered, *(item for item in items if id(item) not in placed)]
