"""How a task is done although workers die or hang, machines go, and bodies are lost."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, Final, TypeVar

import trio

from stepfs._internal import tracing
from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError
from stepfs_producer.backoff import Backoff, Outage
from stepfs_producer.engine.api import Engine, H, Kept, Lost, Reference, WorkerDied

_log = logging.getLogger("stepfs.producer")

T = TypeVar("T")

WORKERS_MAX: Final = 3  # that one task may cost
MACHINES_MAX: Final = 8
LATE_S_MIN: Final = 5.0
LATE_TIMES_MEAN: Final = 10  # of the tasks of its kind and source
_KEPT: Final = 0.9  # weight of the mean so far when another task is done


class KeptBody:
    """The body of a kept task. Its first holder is the caller that got it; without a holder it is released.

    Where it is lost, or was released and is held again, `make_again` repeats its task, once for all that wait.
    """

    def __init__(
        self,
        reference: Reference,
        again: Callable[[], Awaitable[Reference]],
        release: Callable[[Reference], None],
    ) -> None:
        self.nbytes = reference.nbytes
        self._reference: Reference | None = reference
        self._again = again
        self._release = release
        self._holders = 1
        self._making = trio.Lock()

    @property
    def here(self) -> bool:
        return self._reference is not None

    @property
    def reference(self) -> Reference:
        """The reference to give to a task, while the body is `here` and held."""
        assert self._reference is not None
        return self._reference

    def hold(self) -> None:
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        assert self._holders >= 0
        if not self._holders and self._reference is not None:
            self._release(self._reference)
            self._reference = None

    @contextmanager
    def held(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def note_lost(self, references: Collection[Reference]) -> bool:
        """Whether it is one of these, and lost; another task may have noted it before, and have made it again."""
        if self._reference is None or not any(one is self._reference for one in references):
            return False
        self._release(self._reference)
        self._reference = None
        return True

    async def make_again(self) -> None:
        """Return once it is there. The caller holds it."""
        async with self._making:
            if self._reference is None:
                self._reference = await self._again()


class WorkersDiedError(StepfsError):
    """A task killed every worker that it was given to."""


class MachinesLostError(StepfsError):
    """Every machine that a task was given to was lost."""


class _Deaths:
    """The workers that one task has cost."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._workers = 0
        self._machines = 0

    def note(self, death: WorkerDied) -> None:
        """`WorkersDiedError` and `MachinesLostError` if it is one too many."""
        self._workers += not death.with_machine
        self._machines += death.with_machine
        end = "Nothing was committed beyond the steps before it"
        if self._workers == WORKERS_MAX:
            raise WorkersDiedError(
                f"{self._what}: {self._workers} workers died of it in a row ({death.reason}). Is the memory too small, or "
                f"does a library fail on these records? {end}"
            )
        if self._machines == MACHINES_MAX:
            raise MachinesLostError(
                f"{self._what}: {self._machines} machines were lost under it in a row ({death.reason}). Are nodes taken away, "
                f"or does it take all of their memory? {end}"
            )
        _log.info("%s: its worker died, another one takes over", self._what)


class PerAttempt:
    """An argument that is made anew for every worker."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.make = make


class TaskRunner:
    """The tasks of a run: as many at a time as the engine has workers, and second tries of late ones on its spares."""

    def __init__(self, engine: Engine, give_up_after_s: float, outage: Outage | None = None) -> None:
        """`outage`: of the lake's store, shared with who commits."""
        self._engine = engine
        self._give_up_after_s = give_up_after_s
        self._outages = defaultdict(Outage, {"": outage or Outage()})  # by source; "": of the lake
        self._room = trio.CapacityLimiter(engine.workers)
        self._spares = trio.CapacityLimiter(engine.spares)
        self._held_s: dict[str, float] = defaultdict(float)
        self._holding: dict[object, tuple[str, float]] = {}  # source and beginning
        self._means_s: dict[tuple[object, str], float] = {}
        self.late = 0  # tasks, so far
        self.lost = 0  # bodies, so far
        self.seconds = 0.0  # of workers, so far

    @property
    def workers(self) -> int:
        """Tasks that may run at a time. Setting it starts or ends workers."""
        return self._engine.workers

    @workers.setter
    def workers(self, count: int) -> None:
        self._engine.workers = count
        self._room.total_tokens = count
        self._spares.total_tokens = self._engine.spares

    def held_s(self) -> Mapping[str, float]:
        """Seconds until now that tasks held a worker, by source; those under way are included."""
        now_s = trio.current_time()
        held_s = self._held_s.copy()
        for source, began_s in self._holding.values():
            held_s[source] += now_s - began_s
        return held_s

    @asynccontextmanager
    async def _a_worker(self, source: str) -> AsyncIterator[None]:
        key = object()
        await self._engine.up()  # a task is not late because workers take long to start
        async with self._room:
            began_s = trio.current_time()
            self._holding[key] = source, began_s
            try:
                yield
            finally:
                del self._holding[key]
                self._held_s[source] += trio.current_time() - began_s

    async def carry_out(self, what: str, source: str, function: Callable[..., T], *arguments: object) -> T:
        """The result of `function(*arguments)`. `what` names the task in messages; `source` is empty for steps.

        A `KeptBody` among the arguments is held meanwhile, and made again if it is lost. `WorkersDiedError` after three
        workers died of it, `MachinesLostError` after eight machines were lost; `StoreUnreachableError` when its store was
        silent too long.
        """
        result: T = await self._repeated(what, source, function, arguments, keep=False)
        return result

    async def keep(
        self, what: str, source: str, function: Callable[..., tuple[H, object]], *arguments: object
    ) -> tuple[H, KeptBody]:
        kept: Kept[H] = await self._repeated(what, source, function, arguments, keep=True)

        async def again() -> Reference:
            found: Kept[H] = await self._repeated(what, source, function, arguments, keep=True)
            if found.head != kept.head:
                raise RefusedError(
                    f"{what}: done again, it has another result; files that changed? A transform has to be a function of its "
                    "record and key"
                )
            return found.reference

        return kept.head, KeptBody(kept.reference, again, self._engine.release)

    async def _repeated(
        self,
        what: str,
        source: str,
        function: Callable[..., object],
        arguments: Sequence[object],
        *,
        keep: bool,
    ) -> Any:
        backoff = Backoff(what, self._give_up_after_s, self._outages[source])
        deaths = _Deaths(what)
        with ExitStack() as held:
            for argument in arguments:
                if isinstance(argument, KeptBody):
                    held.enter_context(argument.held())
            while True:
                try:
                    result = await self._first_answer(what, source, function, *await _resolved(arguments), keep=keep)
                except OSError as error:
                    await backoff.failed(StoreUnreachableError(f"{what}: {error}"))
                    continue
                except StoreUnreachableError as error:
                    await backoff.failed(error)
                    continue
                if isinstance(result, Lost):
                    self._note_lost(result, arguments)
                    _log.info("%s: it lacks bodies that are lost, and are made again", what)
                elif isinstance(result, WorkerDied):
                    deaths.note(result)
                else:
                    return result

    async def culprit(
        self, first: int, last: int, function: Callable[..., tuple[object, object]], *arguments: object
    ) -> int | None:
        """The record of `first` … `last` - 1 that kills a worker by itself, found by halving; None if none does.

        The task is `function(*arguments, first, last)`, and is kept. A search costs 17 workers in the largest group.
        """
        while last - first > 1:
            middle = (first + last) // 2
            if await self._kills(function, *arguments, first, middle):
                last = middle
            else:
                first = middle
        return first if await self._kills(function, *arguments, first, last) else None

    async def _kills(self, function: Callable[..., tuple[object, object]], *arguments: object) -> bool:
        while True:
            given = await _resolved(arguments)
            async with self._room:
                try:
                    result = await self._engine.keep(function, *given)
                except (
                    StepfsError,
                    OSError,
                ):  # of another record: it would have ended the run, had the worker lived
                    return False
            if isinstance(result, Kept):
                self._engine.release(result.reference)
            if not isinstance(result, Lost):
                return isinstance(result, WorkerDied)
            self._note_lost(result, arguments)

    def _note_lost(self, result: Lost, arguments: Sequence[object]) -> None:
        bodies = {argument for argument in arguments if isinstance(argument, KeptBody)}
        self.lost += sum(body.note_lost(result.references) for body in bodies)

    async def _first_answer(
        self, what: str, source: str, function: Callable[..., object], *arguments: object, keep: bool
    ) -> Any:
        """The answer of one worker, or of two while the first one is late: a result or `Kept`, `WorkerDied`, `Lost`."""
        answers: list[object] = []
        under_way = 0

        async def try_once(scope: trio.CancelScope, patience_s: float) -> None:
            nonlocal under_way
            under_way += 1
            began_s = trio.current_time()
            with trio.move_on_after(patience_s) as patience:
                answer = await self._answer(function, *arguments, keep=keep)
            under_way -= 1
            if patience.cancelled_caught:
                self._engine.warm_spare()
                return
            if isinstance(answer, WorkerDied) and under_way:
                return  # the other one may still answer
            if not isinstance(answer, WorkerDied | Lost | Exception):
                self._note(function, source, trio.current_time() - began_s)
            answers.append(answer)
            scope.cancel()

        async with self._a_worker(source), trio.open_nursery() as nursery:
            nursery.start_soon(try_once, nursery.cancel_scope, math.inf)  # to the end: it may only be long
            patience_s = self._late_after_s(function, source)
            await trio.sleep(patience_s)
            self.late += 1
            while not answers:
                patience_s *= 2
                async with self._spares:
                    await self._engine.end_stalled()  # or that one may cost twice the patience
                    _log.info("%s: late, another worker tries it as well", what)
                    until_s = trio.current_time() + patience_s
                    await try_once(nursery.cancel_scope, patience_s)
                await trio.sleep_until(until_s)  # if that one died of it, the next one may as well
        if under_way:
            self._engine.warm_spare()  # in place of the one that came second, and was ended
        for other in answers[1:]:
            if isinstance(other, Kept):
                self._engine.release(other.reference)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    async def _answer(self, function: Callable[..., Any], *arguments: object, keep: bool) -> object:
        submit = self._engine.keep if keep else self._engine.submit
        try:
            return await submit(function, *(one.make() if isinstance(one, PerAttempt) else one for one in arguments))
        except Exception as error:  # noqa: BLE001 - raised once it is known that it is the first answer
            return error

    def _late_after_s(self, function: Callable[..., object], source: str) -> float:
        return max(LATE_S_MIN, LATE_TIMES_MEAN * self._means_s.get((function, source), 0.0))

    def _note(self, function: Callable[..., object], source: str, seconds: float) -> None:
        self.seconds += seconds
        if tracing.ring is not None:
            tracing.ring.add("workers", f"{function.__name__} {source}".rstrip(), seconds)
        before = self._means_s.get((function, source), seconds)
        self._means_s[function, source] = _KEPT * before + (1 - _KEPT) * seconds


async def _resolved(arguments: Sequence[object]) -> list[object]:
    """References in place of bodies; those that are not there are made again, side by side."""
    while missing := {one for one in arguments if isinstance(one, KeptBody) and not one.here}:
        async with trio.open_nursery() as nursery:
            for body in missing:
                nursery.start_soon(body.make_again)
    return [one.reference if isinstance(one, KeptBody) else one for one in arguments]
