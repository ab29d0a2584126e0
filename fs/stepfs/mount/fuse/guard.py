"""Wraps every handler, once: counted, timed, and unable to kill the mount.

pyfuse3 ends its main loop on any exception but `FUSEError`. So every exception of a handler becomes an errno: an
expected failure has an errno of its own, an unexpected exception becomes EIO and a log line with a traceback. Every
request that would change something gets EROFS.
"""

import errno
import functools
import inspect
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar, cast

import pyfuse3
import trio

from stepfs._internal import tracing
from stepfs._internal.histogram import Histogram
from stepfs.errors import ReclaimedError, StepfsError, StoreUnreachableError
from stepfs.follow.waits import WaitOutcome
from stepfs.format.ids import Step
from stepfs.view.inodes import SliceFile, node_of

_log = logging.getLogger("stepfs.mount")

ACCESSLOG_LINES: Final = 1000

Subject = tuple[int | bytes, ...]  # inode or handle, then name, or offset and size

_NOT_HANDLERS: Final = frozenset({"init", "stacktrace"})
_WAITED_FOR: Final = frozenset({"lookup", "getattr", "open", "opendir", "readdir", "read"})
# All others are EIO: archived, moved or damaged, and a committed object that is missing is not "no such file".
_ERRNOS: Final = ((StoreUnreachableError, errno.ETIMEDOUT), (ReclaimedError, errno.ENOENT))
_FAULTS: Final = frozenset({errno.EIO, errno.ETIMEDOUT})
_TURNS: Final = 20  # of the loop, in which an error of a task comes to its nursery
_Operations = TypeVar("_Operations", bound=type[pyfuse3.Operations])
_Handler = Callable[..., Awaitable[object]]

CHANGES: Final = (
    "setattr", "mknod", "mkdir", "unlink", "rmdir", "symlink", "rename", "link", "create", "write", "setxattr",
    "removexattr",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Access:
    """One request, for the access log."""

    time_s: float  # wall clock, when it ended
    operation: str
    subject: Subject
    duration_s: float
    errno: int


class Meter:
    """Requests of one mount by operation: number, duration, errors."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.durations: defaultdict[str, Histogram] = defaultdict(Histogram)  # seconds, by operation
        self.errors: Counter[tuple[str, int]] = Counter()
        self.is_ending: Callable[[], bool] = lambda: False  # this daemon
        self.held = 0  # requests that handlers have taken and not answered yet
        self.faults = 0  # unexpected exceptions: bugs
        self.bytes_read = 0
        self.last_step: Step | None = None  # the step that a reader opened last
        self.opened = Step(0)  # one past the greatest step that a reader has opened
        self.waited = Waited()
        self.steps_invalidated = 0
        self.accesses: deque[Access] = deque(maxlen=ACCESSLOG_LINES)
        self.started_at = time.time()
        self.on_opened: Callable[[], None] = lambda: None  # called when `opened` grows

    def reading(self) -> int:
        """Requests so far with which readers come to their bytes."""
        return self.requests["lookup"] + self.requests["open"] + self.requests["read"]

    def note_open(self, step: Step) -> None:
        self.last_step = step
        if step >= self.opened:
            self.opened = Step(step + 1)
            self.on_opened()

    def done(self, operation: str, subject: Subject, duration_s: float, error: int) -> None:
        """Count a finished request; `error` is an errno, 0 for success."""
        self.requests[operation] += 1
        self.durations[operation].observe(duration_s)
        if error:
            self.errors[operation, error] += 1
        self.accesses.append(Access(time.time(), operation, subject, duration_s, error))
        if tracing.ring is not None:
            _trace(tracing.ring, self.accesses[-1])

    def accesslog(self) -> str:
        """The newest requests, oldest first: `time operation(subject) errno <seconds>`."""
        return "".join(
            f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(a.time_s))}.{int(a.time_s % 1 * 1e6):06d}Z "
            f"{a.operation}({shown(a.subject)}) {errno.errorcode.get(a.errno, 'OK')} <{a.duration_s:.6f}>\n"
            for a in list(self.accesses)
        )


def _trace(ring: tracing.Ring, access: Access) -> None:
    """The opens and reads of slices."""
    number = access.subject[0] if access.subject else 0
    if access.operation not in {"open", "read"} or not isinstance(number, int):
        return
    node = node_of(number if access.operation == "open" else number >> 1)  # handles: `files.inode_of`
    if isinstance(node, SliceFile):
        facts = {"errno": errno.errorcode[access.errno]} if access.errno else {}
        more = dict(zip(("offset", "size"), access.subject[1:], strict=False)) if access.operation == "read" else {}
        name = f"{access.operation} step {node.step}"
        ring.add(f"slice {node.index}: reader", name, access.duration_s, step=node.step, **more, **facts)


def shown(subject: Subject) -> str:
    """The subject as a line of text; names are the callers' arbitrary bytes."""
    return ", ".join(
        part.decode(errors="backslashreplace").encode("unicode_escape").decode()
        if isinstance(part, bytes)
        else str(part)
        for part in subject
    )


class Waited:
    """The time in which at least one request was under way: the best single sign of late data."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._sum_s = 0.0

    def began(self) -> None:
        if not self._under_way:
            self._since_s = time.perf_counter()
        self._under_way += 1

    def ended(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._sum_s += time.perf_counter() - self._since_s

    def seconds(self) -> float:
        """The total so far, current requests included."""
        return self._sum_s + (time.perf_counter() - self._since_s if self._under_way else 0.0)


class Shares:
    """What readers hold of something scarce. One user gets at most as much as all the others leave free, so nobody can
    take all of it: the first one half, the next a half of the rest.
    """

    def __init__(self, most: int, refused: int) -> None:
        """`refused`: the errno for a user who asks for more."""
        self._most, self._refused = most, refused
        self._held: Counter[int] = Counter()  # by uid

    def take(self, uid: int, amount: int = 1) -> None:
        if self._held[uid] + amount > self._most - self._held.total() - amount:
            raise pyfuse3.FUSEError(self._refused)
        self._held[uid] += amount

    def give_back(self, uid: int, amount: int = 1) -> None:
        self._held[uid] -= amount
        if not self._held[uid]:
            del self._held[uid]

    @contextmanager
    def held(self, uid: int) -> Iterator[None]:
        self.take(uid)
        try:
            yield
        finally:
            self.give_back(uid)


def guarded(cls: _Operations) -> _Operations:
    """Class decorator: wrap every handler of pyfuse3's interface, inherited ones too. Needs `self.meter`."""
    for name in dir(pyfuse3.Operations):
        handler = getattr(cls, name)
        if inspect.iscoroutinefunction(handler) and name not in _NOT_HANDLERS:
            setattr(cls, name, _wrap(name, handler))
    return cls


def errno_of(error: StepfsError) -> int:
    return next((code for kind, code in _ERRNOS if isinstance(error, kind)), errno.EIO)


def refusal(outcome: WaitOutcome, *, expired_errno: int) -> pyfuse3.FUSEError:
    """The error of a caller whose wait ended in vain."""
    codes = {
        WaitOutcome.NEVER: errno.ENOENT,
        WaitOutcome.EXPIRED: expired_errno,
        WaitOutcome.SILENT: errno.ETIMEDOUT,
        WaitOutcome.INTERRUPTED: errno.EINTR,
    }
    return pyfuse3.FUSEError(codes[outcome])


def _wrap(name: str, handler: _Handler) -> _Handler:
    silent = name == "forget"  # it has no reply and must not raise
    waited_for = name in _WAITED_FOR

    @functools.wraps(handler)
    async def guard(self: pyfuse3.Operations, *args: object) -> object:
        meter = cast("Meter", cast("Any", self).meter)
        meter.held += 1
        began = time.perf_counter()
        code = errno.EINTR  # if no branch below runs, the handler was cancelled
        if waited_for:
            meter.waited.began()
        try:
            result = await handler(self, *args)
            code = 0
        except pyfuse3.FUSEError as error:
            code = error.errno
            if code in _FAULTS:
                await _unless_ending(meter)
            raise
        except StepfsError as error:
            code = errno_of(error)
            await _unless_ending(meter)
            subject = _subject(args)
            facts = {"operation": name, "errno": errno.errorcode[code], "alike": (name, subject, type(error))}
            _log.warning("%s(%s) failed: %s", name, shown(subject), error, extra=facts)
            raise pyfuse3.FUSEError(code) from error
        except Exception as error:
            code = errno.EIO
            await _unless_ending(meter)
            meter.faults += 1
            alike = (name, type(error), str(error))
            facts_of_bug = {"operation": name, "alike": alike}
            _log.exception("%s(%s) failed unexpectedly", name, shown(_subject(args)), extra=facts_of_bug)
            if silent:
                return None
            raise pyfuse3.FUSEError(errno.EIO) from error
        else:
            return result
        finally:
            meter.held -= 1
            if waited_for:
                meter.waited.ended()
            meter.done(name, _subject(args), time.perf_counter() - began, code)

    return guard


async def _unless_ending(meter: Meter) -> None:
    """Do not return in a daemon that ends, maybe by the very error: the next one answers the request."""
    for _ in range(_TURNS):
        if meter.is_ending():
            await trio.sleep_forever()
        with trio.CancelScope(shield=True):  # a daemon that reads no more still answers what it has read
            await trio.lowlevel.checkpoint()


def _subject(args: tuple[object, ...]) -> Subject:
    """The inode or handle, and the name or range, without the context object. Formatted only when shown."""
    return tuple(arg for arg in args if isinstance(arg, int | bytes))


def read_only(cls: _Operations) -> _Operations:
    """Class decorator: every handler that would change something raises EROFS."""
    for name in CHANGES:
        assert hasattr(pyfuse3.Operations, name)
        setattr(cls, name, _refuse)
    return cls


async def _refuse(_self: pyfuse3.Operations, *_args: object) -> NoReturn:
    raise pyfuse3.FUSEError(errno.EROFS)
