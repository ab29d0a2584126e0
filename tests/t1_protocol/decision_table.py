"""What `decide` makes of every small record and request, in the terms of `model/control.pml`.

The model prints its transitions; `decided` computes those of the code for the same records and requests. A change of one
side without the other makes them differ (test_model.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations

from stepfs.errors import AbsentError, WithdrawnError
from stepfs.format.control import ControlRecord, GroupRecord
from stepfs.format.ids import Step, Version
from stepfs.lake.decisions import Add, Advance, Drop, Register, Request, Resume, Retire, Revise, decide, successor

NUMBER = 5
ABSENT = 3  # in place of a start: there is no such group
GROUPS = ("a", "b")

Told = str  # "REFUSED", or "SAME" or "NEXT" and the record that follows
Row = tuple[str, int, tuple[int, ...]]  # request, what it is about, record
Table = Mapping[Row, tuple[bool, Told]]  # whether the request fences, and what is decided

# What a request is about is a set of checkpoints, of which most requests take one; of `ADVANCE` it is a step.
REQUESTS: Mapping[str, Callable[[int], Request]] = {
    "REGISTER": lambda _: Register("a"),
    "ADD": lambda what: Add("a", _one(what)),
    "RESUME": lambda what: Resume("a", _one(what)),
    "HOOK": lambda what: Add("a", _one(what), keep=1),
    "REPLACE": lambda what: Revise("a", lambda _: frozenset(_steps(what))),
    "REVISE": lambda what: Revise("a", lambda _: frozenset(_steps(what)), revives=False),
    "DROP": lambda what: Drop("a", _one(what)),
    "RETIRE": lambda _: Retire("a"),
    "ADVANCE": lambda what: Advance(Step(what), Version(0), 0),
}
VERDICTS = ("SAME", "NEXT", "REFUSED")


def read_table(printed: str, names: Sequence[str]) -> Table:
    """The rows that the model printed; `names`: its requests, by number from 1."""
    table: dict[Row, tuple[bool, Told]] = {}
    for request, fences, what, record, verdict, then in re.findall(
        r"^row (\d+) (\d) (\d)((?: \d+){7}) -> (\d)((?: \d+)*)$", printed, re.MULTILINE
    ):
        key = names[int(request) - 1], int(what), tuple(map(int, record.split()))
        told = fences == "1", VERDICTS[int(verdict) - 1] + then
        assert table.setdefault(key, told) == told
    return table


def decided(rows: Iterable[Row]) -> Table:
    """What the code decides on the same records. The order of recording, which the model leaves out, changes nothing."""
    table = {}
    for name, what, record in rows:
        request = REQUESTS[name](what)
        told = {_told(read, request) for read in _records(record)}
        assert len(told) == 1, (name, what, record, told)
        table[name, what, record] = request.fences, told.pop()
    return table


def _told(record: ControlRecord, request: Request) -> Told:
    try:
        following = decide(NUMBER, record, request)
    except (AbsentError, WithdrawnError):
        return "REFUSED"
    before, after = _seen(record), _seen(following or successor(NUMBER, record))
    return f"{'SAME' if after[:5] == before[:5] else 'NEXT'} {' '.join(map(str, after))}"


def _records(row: tuple[int, ...]) -> Iterable[ControlRecord]:
    """Every record that the model's one stands for."""
    live, start_a, kept_a, start_b, kept_b, *until = row
    for order in permutations(_steps(kept_a)):
        groups = {
            name: GroupRecord(Step(start), _steps(kept), order if name == "a" and order != _steps(kept) else ())
            for name, start, kept in (("a", start_a, kept_a), ("b", start_b, kept_b))
            if start != ABSENT
        }
        record = ControlRecord(first_live_step=Step(live), groups=groups)
        former = [(ended, Step(need)) for need, ended in enumerate(until) if ended]
        yield ControlRecord(first_live_step=Step(live), groups=groups, minima=(*former, (NUMBER + 1, record.need)))


def _seen(record: ControlRecord) -> tuple[int, ...]:
    """The record in the model's terms."""
    seen: list[int] = [record.first_live_step]
    for name in GROUPS:
        group = record.groups.get(name)
        seen += (ABSENT, 0) if group is None else (group.start, sum(1 << step for step in group.kept))
    *former, (_, need) = record.minima
    assert need == record.need
    ended = {least: number for number, least in former}
    assert set(ended) <= {0, 1}
    return *seen, ended.get(Step(0), 0), ended.get(Step(1), 0)


def _steps(kept: int) -> tuple[Step, ...]:
    return tuple(Step(step) for step in range(ABSENT) if kept & 1 << step)


def _one(what: int) -> Step:
    (step,) = _steps(what)
    return step
