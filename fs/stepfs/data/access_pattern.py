"""Which steps readers will open next, learned from the files that they opened, and how far ahead to fetch. No I/O, no clock.

`AccessHistory` keeps runs of recently opened steps, `ordered_runs` picks those that are read in order, `plan_ahead` names
the steps that follow.
"""

import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stepfs.data.tuning import TUNING
from stepfs.format.ids import SliceIndex, Step

EVIDENCE_STEPS: Final = 8  # of a run: its slices are learned from so many, and so many close ones are no accident
_NEXT_STEPS: Final = 2  # a step so little above an opened one goes on from it …
_MEMORY_STEPS: Final = 128  # … if that was opened at most so many steps ago
_CLOSE_SHARE: Final = 0.75  # of the steps opened last must be close together …
_CLOSE_FACTOR: Final = 2  # … within so many times as many places
_SOON_STEPS: Final = 32  # … if they were opened while at most so many others were
_START_STEPS: Final = 16  # reading begins at the first step, or so little behind it

_LIVE_ROUNDS: Final = 2  # … nor during so many steps of every run, where many readers take turns
GAP_STEPS: Final = 16
STATE_FILES_MAX: Final = 4096  # of which the next daemon of a mount hears
_PASS_STEPS: Final = 24  # reopening a file this many distinct steps later is a new pass over the data

Opened = Callable[[Step], Collection[SliceIndex]]
Plan = list[tuple[Step, tuple[SliceIndex, ...]]]


@dataclass(frozen=True, slots=True)
class AccessRun:
    """Readers that are near each other."""

    steps: tuple[Step, ...]  # recently opened, ascending
    indices: frozenset[SliceIndex]  # the slices expected to be opened in each step
    stride: int
    latest: tuple[Step, ...] = ()  # some of `steps`, opened last first
    age_steps: int = 0  # distinct steps opened since the oldest of `latest`

    @property
    def low(self) -> Step:
        return self.steps[0]

    @property
    def high(self) -> Step:
        return self.steps[-1]


def usual_slices(opened: Sequence[Collection[SliceIndex]]) -> frozenset[SliceIndex]:
    """The slices that readers open of a step, from those opened of each of the latest steps.

    Once there is evidence, one look at all files of one step (a checksum, a copy) teaches nothing.
    """
    enough = 1 if len(opened) < EVIDENCE_STEPS // 2 else 2
    times = Counter(itertools.chain.from_iterable(opened))
    return frozenset(index for index, count in times.items() if count >= enough)


class OrderEvidence:
    """How often a step that was opened for the first time went on from another."""

    def __init__(self) -> None:
        self._went_on: deque[bool] = deque(maxlen=TUNING.judged_steps)
        self._recent: deque[Step] = deque(maxlen=_MEMORY_STEPS)

    def note(self, step: Step) -> None:
        """A step is opened that was not opened lately. The first one of all proves nothing."""
        if self._recent:
            self._went_on.append(any(0 < step - other <= _NEXT_STEPS for other in self._recent))
        self._recent.append(step)

    def trusts(self, steps: int) -> bool:
        """Whether readers will go on from a step, in a lake of so many steps."""
        chance = _NEXT_STEPS * len(self._recent) / max(1, steps)
        enough = TUNING.trust_share * len(self._went_on)
        return bool(self._went_on) and chance <= TUNING.chance_max and sum(self._went_on) >= enough

    def state(self) -> tuple[list[bool], list[int]]:
        """What `inherit` takes."""
        return [*self._went_on], [*self._recent]

    def inherit(self, went_on: Iterable[bool], recent: Iterable[int]) -> None:
        self._went_on = deque(went_on, TUNING.judged_steps)
        self._recent = deque(map(Step, recent), _MEMORY_STEPS)

    @property
    def goes_on(self) -> bool:
        """Whether the step opened last did, or is the first."""
        return not self._went_on or self._went_on[-1]

    @property
    def unbroken(self) -> bool:
        """Whether nothing has jumped, as far as is remembered."""
        return all(self._went_on)


def ordered_runs(runs: Sequence[AccessRun], evidence: OrderEvidence, *, first: Step, frontier: Step) -> list[AccessRun]:
    """The runs that readers will continue; [first, frontier] are the steps that they may open."""
    trusted = evidence.trusts(frontier - first + 1)
    found = []
    for run in runs:
        places = (run.high - run.low) // run.stride + 1
        is_dense = len(run.latest) >= EVIDENCE_STEPS and len(run.steps) >= TUNING.dense_fill * places
        begins = evidence.unbroken and run.low - first < _START_STEPS
        if len(run.latest) == 1:
            if trusted or begins:
                found.append(run)
        elif (low := _close_from(run)) is not None:
            sure = len(run.latest) >= EVIDENCE_STEPS and run.age_steps <= _SOON_STEPS
            if trusted or sure or begins:
                found.append(run if is_dense else _without_strays(run, low))
        elif is_dense and run.high - run.low <= TUNING.dense_share * (frontier - first):
            found.append(run)
    return found


def _close_from(run: AccessRun) -> Step | None:
    """The step at which most of those opened last begin, if they lie within a stretch of twice as many places."""
    steps = sorted(run.latest)
    most = math.ceil(_CLOSE_SHARE * len(steps))
    span, low = min((high - low, low) for low, high in zip(steps, steps[most - 1 :], strict=False))
    return low if span < _CLOSE_FACTOR * most * run.stride else None


def _without_strays(run: AccessRun, low: Step) -> AccessRun:
    """The steps below are not filled up: another reader jumped there."""
    return replace(run, steps=tuple(step for step in run.steps if step >= low))


class AccessHistory:
    """The recently opened files of one mount."""

    def __init__(self) -> None:
        # Least recently touched first.
        self._opened: OrderedDict[Step, dict[SliceIndex, None]] = OrderedDict()
        self.order = OrderEvidence()

    def note(self, step: Step, index: SliceIndex) -> bool:
        """A file was opened; True if this is a step not opened lately (the readers moved)."""
        seen = self._opened.get(step)
        if (
            seen is not None
            and index in seen
            and step not in itertools.islice(reversed(self._opened), _PASS_STEPS)  # a new pass over the data
        ):
            for _ in range(max(0, len(self._opened) - _PASS_STEPS)):
                self._opened.popitem(last=False)
            seen = self._opened.get(step)
        if seen is None:
            self.order.note(step)
            seen = self._opened[step] = {}
            fresh = True
        else:
            fresh = False
        seen[index] = None
        self._opened.move_to_end(step)
        if len(self._opened) > TUNING.recent_steps:
            self._opened.popitem(last=False)
        return fresh

    def state(self) -> list[list[int]]:
        """For the next daemon of the mount: the newest steps, each with the slices opened of it, `STATE_FILES_MAX` in all."""
        found, room = list[list[int]](), STATE_FILES_MAX
        for step in reversed(self._opened):
            found.append([step, *itertools.islice(self._opened[step], room)])
            room -= len(found[-1]) - 1
            if room <= 0:
                break
        return found[::-1]

    def inherit(self, opened: Iterable[Sequence[int]]) -> None:
        self._opened = OrderedDict(
            (Step(step), dict.fromkeys(map(SliceIndex, seen))) for step, *seen in filter(None, opened) if seen
        )

    def opened(self, step: Step) -> Collection[SliceIndex]:
        """Slices of a step that were opened lately: no need to fetch them ahead."""
        return self._opened.get(step, {}).keys()

    def forget_below(self, step: Step) -> None:
        for old in [old for old in self._opened if old < step]:
            del self._opened[old]

    def runs(self) -> list[AccessRun]:
        """The runs that still have a reader, lowest first."""
        by_recency = list(reversed(self._opened))
        recency = {step: rank for rank, step in enumerate(by_recency)}
        found: list[list[Step]] = []
        for step in sorted(self._opened):
            if found and step - found[-1][-1] <= GAP_STEPS:
                found[-1].append(step)
            else:
                found.append([step])
        live = set(by_recency[: max(TUNING.live_steps, _LIVE_ROUNDS * len(found))])
        return [self._run(steps, recency) for steps in found if not live.isdisjoint(steps)]

    def _run(self, steps: Sequence[Step], recency: dict[Step, int]) -> AccessRun:
        latest = sorted(steps, key=recency.__getitem__)[:EVIDENCE_STEPS]
        indices = usual_slices([self._opened[step] for step in latest])
        strides = math.gcd(*(step - steps[0] for step in steps[1:]))
        stride = strides if len(steps) >= EVIDENCE_STEPS // 2 else 1
        return AccessRun(tuple(steps), indices, stride, tuple(latest), recency[latest[-1]])


class StepRate:
    """How many new steps the readers open per second."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=TUNING.pace_samples)

    def note(self, now: float) -> None:
        self._times.append(now)

    def state(self, now: float) -> list[float]:
        """Seconds since each open."""
        return [now - time for time in self._times]

    def inherit(self, ages_s: Iterable[float], now: float) -> None:
        self._times = deque((now - age_s for age_s in ages_s), TUNING.pace_samples)

    def steps_per_s(self) -> float | None:
        """None until there is something to measure."""
        if len(self._times) < 3 or self._times[-1] <= self._times[0]:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])


def window_steps(*, pace: float | None, latency_s: float, step_bytes: int, budget_bytes: int) -> int:
    """Steps ahead that hide `TUNING.horizon_s` and twice the usual worst latency, within the budget."""
    affordable = budget_bytes // step_bytes if step_bytes else TUNING.window_max
    needed = TUNING.window_min if pace is None else math.ceil(pace * (TUNING.horizon_s + 2 * latency_s)) + 1
    return max(1, min(max(needed, TUNING.window_min), affordable, TUNING.window_max))


def plan_ahead(
    runs: Sequence[AccessRun],
    opened: Opened,
    *,
    hinted: frozenset[SliceIndex],
    window: int,
    first: Step,
    frontier: Step,
    fixed: bool = False,
) -> Plan:
    """Steps in [first, frontier] that will be opened soon, with the slices not opened yet, nearest first.

    Within a run, unopened steps below its highest one come first: another worker is about to open them.
    """
    distances: dict[Step, int] = {}
    wanted: dict[Step, set[SliceIndex]] = {}
    for run in runs:
        ahead = window if fixed else min(window, 1 << min(len(run.steps), 12))
        for number in range(run.low, run.high + ahead * run.stride + 1, run.stride):
            step = Step(number)
            missing = (hinted or run.indices).difference(opened(step))
            if missing and first <= step <= frontier:
                distance = max(0, (step - run.high) // run.stride)
                distances[step] = min(distance, distances.get(step, distance))
                wanted.setdefault(step, set()).update(missing)
    order = sorted(wanted, key=lambda step: (distances[step], step))
    return _cut([(step, tuple(sorted(wanted[step]))) for step in order])


def plan_start(hinted: frozenset[SliceIndex], *, window: int, first: Step, frontier: Step) -> Plan:
    """Before the first open, when the slices are known: the steps where reading will begin."""
    if not hinted:
        return []
    stop = min(first + window, frontier + 1)
    return _cut([(Step(step), tuple(sorted(hinted))) for step in range(first, stop)])


def _cut(plan: Plan) -> Plan:
    """The nearest steps with at most `TUNING.planned_files_max` files, at least one: planning must not hold up the loop."""
    files = 0
    for number, (_, indices) in enumerate(plan):
        files += len(indices)
        if files > TUNING.planned_files_max:
            return plan[: max(1, number)]
    return plan
