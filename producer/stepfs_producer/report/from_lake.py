"""The figures of a lake, from some of its commits, each of which has its producer's position, and the files of some steps.

What is read is bounded, however long the lake is; a step that cannot be read is named, and left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final

import numpy as np
import trio
from numpy.typing import NDArray

from stepfs.errors import AbsentError, CorruptError, RefusedError, UsageError
from stepfs.format.commit import Commit
from stepfs.format.ids import SliceIndex, Step, Version
from stepfs.format.planned import PlanStanding, read_plan_position
from stepfs.format.snapshot import StepEntry
from stepfs.lake.concurrency import in_order
from stepfs.lake.kept_plans import LineageReader, commit_of
from stepfs.lake.log.reader import LogReader
from stepfs_producer.payloads.step import COUNTS
from stepfs_producer.plan.arrays import IGNORED, Integers
from stepfs_producer.plan.cost import TOKENS, CostModel
from stepfs_producer.plan.model import Plan
from stepfs_producer.report.figures import (
    CommitPoint,
    Contents,
    Report,
    Run,
    Shares,
    StepLook,
    between,
    forecast_of,
    joined,
    slowest_of,
    spread,
    stages_of,
    wanted_shares,
    without_secrets,
)
from stepfs_producer.report.from_plan import POINTS, ROWS
from stepfs_producer.run.check import estimate_plan
from stepfs_producer.run.history.kept_plans import plan_of
from stepfs_producer.run.history.lineage import Wanted, slices_of
from stepfs_producer.run.prepare import schedule_of
from stepfs_producer.run.view import SIDES, Decoded, Row, Words, decoded, payloads_of_a_plan, seen_in_lake

COMMITS_MAX: Final = 256  # that are read, each by two requests at most
LOOKED_MAX: Final = 16  # steps whose files are read
LOOK_BYTES_MAX: Final = 256 << 20  # of their files in all
PLANS_MAX: Final = 4  # producers whose contents are shown
_PROBLEMS_MAX: Final = 10  # that are named
_ROW_STEPS: Final = 4  # from which rows are shown
_TOKENS, _SOURCE, _SIDE = 2, 3, 8  # columns of spans in files; the last one where there are pairs


async def report_of_lake(
    reader: LineageReader,
    status: Mapping[str, Any],
    directory: str,
    *,
    free_bytes: int | None,
    text: bool,
) -> Report:
    """`status`: the lake's document; `free_bytes`: that its store still takes, where that is known."""
    return await _LakeReport(reader, status, directory).made(free_bytes, text=text)


class _LakeReport:
    def __init__(self, reader: LineageReader, status: Mapping[str, Any], directory: str) -> None:
        self._reader, self._status, self._directory = reader, status, directory
        self._log: LogReader = reader.log
        self._notes: dict[str, None] = {}  # in order, each once
        self._problems: dict[str, list[str]] = {}  # error → what it left out
        self._plans: dict[str, Plan | None] = {}  # by digest

    async def made(self, free_bytes: int | None, *, text: bool) -> Report:
        log = self._log
        live = range(log.first_live_step, log.state.next_step)
        own = range(max(live.start, log.state.origins[0].end if log.state.origins else 0), live.stop)
        if own.start > live.start:
            self._note(f"commits of steps below {own.start} are in {without_secrets(log.state.origins[0].url)}")
        commits = await self._commits(own)
        contents = await self._contents(commits)
        candidates = spread(live, self._looked_max(len(live)))
        steps = await self._look(candidates, contents)
        rows, no_ids = await self._rows(steps or candidates[-1:]) if text else ([], "")
        points = [
            CommitPoint(one.time_ms / 1000, one.producer_id, one.next_seq, one.next_step, one.total_bytes)
            for one in commits
        ]
        left = [max(0, one.steps - one.step) for one in contents if one.steps is not None]
        known = sum(left) if left and len(left) == len(contents) else None
        now_s = time.time()
        forecast = None if log.state.sealed else forecast_of(points, now_s, known, log.live_bytes, free_bytes)
        run = Run(self._status, points, forecast)
        looked = f"Files of {len(steps)} steps were looked at: {', '.join(map(str, steps))}. " if steps else ""
        sample = f"{looked}Commits read: {len(commits)} of {log.state.version + 1} versions of the log."
        return Report(without_secrets(log.store.url), now_s, contents, run, sample, list(self._lines()), rows, no_ids)

    def _lines(self) -> Iterator[str]:
        yield from self._notes
        for error, left_out in list(self._problems.items())[:_PROBLEMS_MAX]:
            more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
            yield f"{left_out[0]}{more} left out: {error}"
        if len(self._problems) > _PROBLEMS_MAX:
            yield f"{len(self._problems) - _PROBLEMS_MAX} more problems; `stepfs verify` names them all"

    def _note(self, line: str) -> None:
        self._notes.setdefault(line)

    async def _commits(self, steps: range) -> list[Commit]:
        log = self._log

        async def version(step: int) -> Version | None:
            entry = None
            with self._left_out(f"step {step}"):
                entry = await log.lone_entry(Step(step))
            return None if entry is None else entry.version

        async def commit(version: Version) -> Commit | None:
            found = None
            with self._left_out(f"version {version} of the log"):
                found = await commit_of(log.store, log.identity.lake_id, version)
                if found is None:
                    raise AbsentError("it is gone; try again")
            return found

        async with aclosing(in_order(spread(steps, COMMITS_MAX), version)) as versions:
            known = sorted({one async for _, one in versions if one is not None})
        async with aclosing(in_order(known, commit)) as commits:
            return [one async for _, one in commits if one is not None]

    @contextmanager
    def _left_out(self, what: str) -> Iterator[None]:
        """Around what is left out, and named, where it cannot be read; a store that does not answer ends the report."""
        try:
            yield
        except (AbsentError, CorruptError, RefusedError, UsageError) as error:
            self._problems.setdefault(str(error), []).append(what)

    async def _plan(self, digest: str) -> Plan | None:
        if digest not in self._plans:
            self._plans[digest] = plan = await plan_of(self._log, digest)
            if plan is None:
                self._note(f"plan {digest} is not in the lake, so its mix is not known")
        return self._plans[digest]

    async def _contents(self, commits: Sequence[Commit]) -> list[Contents]:
        """Of the producers with the most tokens."""
        standings = {
            name: standing
            for name, known in self._log.state.producers.items()
            if (standing := read_plan_position(known.position)) is not None
        }
        tokens = {name: sum(one.tokens for one in standing.sources.values()) for name, standing in standings.items()}
        shown = sorted(standings, key=lambda name: (-tokens[name], name))[:PLANS_MAX]
        if len(standings) > len(shown):
            self._note(
                f"contents are those of {', '.join(shown)}; {len(standings) - len(shown)} more producers run a plan"
            )
        if not standings and self._log.state.next_step:
            self._note("no plan made these steps, so what is in them is not known")
        return [await self._of_plan(name, standings[name], commits) for name in shown]

    async def _of_plan(self, name: str, newest: PlanStanding, commits: Sequence[Commit]) -> Contents:
        plan = await self._plan(newest.digest)
        found = Contents(name, newest.digest, newest.step)
        if plan is not None:
            found.steps, found.stages = estimate_plan(plan).steps, stages_of(plan)
        read = (read_plan_position(commit.position) for commit in commits if commit.producer_id == name)
        known = sorted([one for one in (*read, newest) if one is not None], key=lambda one: one.step)
        counts = [(one.step, {source: each.tokens for source, each in one.sources.items()}) for one in known]
        digests = {one.step: one.digest for one in known}
        for steps, tokens in between(counts):
            of_then = await self._plan(digests[steps.stop])
            names = [] if of_then is None else sorted(of_then.sources)
            wanted = {} if of_then is None else wanted_shares(schedule_of(of_then), names, steps)
            found.shares.append(Shares(steps.start, steps.stop, tokens, wanted))
        found.shares = joined(found.shares, POINTS)
        found.tokens = sum(one.tokens for one in newest.sources.values())
        for source, each in newest.sources.items():
            one = found.of(source)
            one.tokens, one.records, one.skipped, one.epoch = each.tokens, each.records, each.skipped, each.epoch
            one.dropped, one.excluded, one.share = each.dropped, each.excluded, each.tokens / max(found.tokens, 1)
        if any(one.skipped for one in found.sources.values()):
            self._note("a lake counts bad records; `stepfs-produce check --deep PLAN` names them, with their reasons")
        return found

    def _looked_max(self, live: int) -> int:
        step_bytes = self._log.live_bytes // max(live, 1)
        return max(1, min(LOOKED_MAX, LOOK_BYTES_MAX // max(step_bytes, 1)))

    async def _look(self, steps: Sequence[int], contents: Sequence[Contents]) -> list[int]:
        """Look at the files of these steps; those that could be read."""
        by_name = {one.name: one for one in contents}
        looked = []
        for step in steps:
            with self._left_out(f"step {step}"):
                entry = await self._log.lone_entry(Step(step))
                if (whose := by_name.get(entry.producer_id)) is not None:
                    await self._look_at(entry, whose)
                    looked.append(step)
        return looked

    async def _look_at(self, entry: StepEntry, whose: Contents) -> None:
        log = self._log
        commit = await commit_of(log.store, log.identity.lake_id, entry.version)
        standing = None if commit is None else read_plan_position(commit.position)
        step = int(entry.step)
        if commit is not None and standing is not None:
            step = standing.step - (commit.next_step - entry.step)  # by the plan's numbers
        plan = await self._plan(whose.plan if standing is None else standing.digest)
        placed = slices_of(log.identity.grid, Wanted())
        wanted: list[SliceIndex] = []
        size = 0
        for index in placed:
            size += entry.tgb.length(index)
            if not wanted or size <= LOOK_BYTES_MAX:
                wanted.append(index)
        if len(wanted) < len(placed):
            self._note(f"of step {entry.step} the first {len(wanted)} of {len(placed)} files were read")
        sums = StepSums(plan, log.identity.grid.cp)
        async with aclosing(self._reader.payloads(entry, wanted)) as payloads:
            async for index, payload in payloads:
                await trio.to_thread.run_sync(self._take, sums, payload, index, placed[index])
        sums.add_to(whose, step)

    def _take(self, sums: StepSums, payload: memoryview, index: SliceIndex, place: tuple[int, int]) -> None:
        with payloads_of_a_plan(f"slice {index}"):
            sums.take(decoded(self._log.identity.ext, payload, Words()), *place)

    async def _rows(self, steps: Sequence[int]) -> tuple[list[tuple[str, Row]], str]:
        """Rows of rank 0, of as few steps as have enough of them, and why they have ids in place of text."""
        rows: list[tuple[int, Row]] = []
        first = [steps[at] for at in spread(range(len(steps)), _ROW_STEPS)]
        why = ""
        for step in [*first, *(step for step in steps if step not in first)]:
            if len(rows) >= ROWS:
                break
            with self._left_out(f"what step {step} reads"):
                seen = await seen_in_lake(self._reader, Wanted(step, 0), self._directory, self._note)
                why = seen.words.why
                rows += [(step, row) for row in seen.rows[: -(-ROWS // len(first))]]
        return [(f"step {step}", row) for step, row in sorted(rows[:ROWS], key=lambda one: one[0])], why


class StepSums:
    """The sums over the files of one step."""

    def __init__(self, plan: Plan | None, cp: int) -> None:
        self._plan, self._cp = plan, cp
        self._tokens = self._room = 0
        self._lengths: dict[str, list[Integers]] = {}
        self._seen: dict[str, tuple[int, int]] = {}  # tokens, and those that the loss looks at
        self._costs: dict[tuple[int, int], dict[str, int]] = {}  # rank, micro-batch → load → cost

    def take(self, found: Decoded, rank: int, micro: int) -> None:
        """A file, whose first micro-batch is `micro` of `rank`."""
        table = found.spans
        if found.documents is None:
            raise UsageError("files of ids alone do not say what is in rows")
        if table is None:
            self._tokens, self._room = self._tokens + int((found.documents >= 0).sum()), self._room + found.ids.size
            return
        tokens = table[:, _TOKENS].astype(np.int64)
        self._tokens += int(tokens.sum())
        self._room += found.ids.size * self._cp
        for number, name in enumerate(found.sources):
            mine = table[:, _SOURCE] == number
            begins = np.flatnonzero(table[mine, _SIDE] != SIDES.index("rejected")) if table.shape[1] > _SIDE else None
            own = tokens[mine]  # both documents of a pair are one, as the planner has them
            self._lengths.setdefault(name, []).append(own if begins is None else np.add.reduceat(own, begins))
        self._note_learned(found, table)
        costs = {} if self._plan is None else costs_of(self._plan, tokens, found.beside)
        for number in range(len(found.ids)):
            here = table[:, 0] == number
            self._costs[rank, micro + number] = {load: int(each[here].sum()) for load, each in costs.items()}

    def _note_learned(self, found: Decoded, table: NDArray[Any]) -> None:
        if found.labels is None or found.documents is None:
            return
        begins = np.searchsorted(table[:, 0], np.arange(len(found.ids)))  # spans are in order of micro-batches
        inside = found.documents >= 0
        spans = (found.documents + begins[:, None])[inside]
        sources = table[spans, _SOURCE]
        learned = sources[(found.labels != IGNORED)[inside]]
        counts = [np.bincount(one, minlength=len(found.sources)).tolist() for one in (sources, learned)]
        for name, *more in zip(found.sources, *counts, strict=True):
            before = self._seen.get(name, (0, 0))
            self._seen[name] = before[0] + more[0], before[1] + more[1]

    def add_to(self, contents: Contents, step: int) -> None:
        places = sorted(self._costs)
        ranks, micros = len({rank for rank, _ in places}), len({micro for _, micro in places})
        loads = self._costs[places[0]] if places else {}
        costs = {
            load: np.array([self._costs[place][load] for place in places], np.int64).reshape(ranks, micros)
            for load in loads
            if len(places) == ranks * micros
        }
        slowest = {} if self._plan is None else slowest_of(self._plan, costs)
        contents.looked.append(StepLook(step, self._tokens / max(self._room, 1), slowest))
        for name, lengths in self._lengths.items():
            contents.of(name).note_lengths(np.concatenate(lengths))
        for name, (seen, learned) in self._seen.items():
            one = contents.of(name)
            one.seen, one.learned = one.seen + seen, one.learned + learned


def costs_of(plan: Plan, tokens: Integers, beside: Mapping[str, NDArray[Any]]) -> dict[str, Integers]:
    """The cost of each document, and its loads; nothing where a function of the user's says what one costs."""
    if plan.cost.call is not None:
        return {}
    rows = {name.removesuffix(COUNTS): each.astype(np.int64) for name, each in beside.items() if name.endswith(COUNTS)}
    of_tokens = CostModel(*plan.cost.coefficients).of_tokens({TOKENS: tokens})
    whole = of_tokens + sum(price * rows[name] for name, price in plan.cost.columns.items() if name in rows)
    loads = {TOKENS: of_tokens, **rows}
    return {"cost": whole} | {name: loads[name] for name in plan.balance.loads if name in loads}
