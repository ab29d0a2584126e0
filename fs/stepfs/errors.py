"""Errors between rooms: one tree; each class documents what the caller should do; commands in their messages.

Normal outcomes of the protocol (a create that lost its race, a step that is not committed yet) are values,
not exceptions; see `stepfs.store.api.Put` and `stepfs.lake.create_once`. An exception of this module ends an operation.
Every class has the exit code that the command lines document, so the command lines need no table of their own.
"""

import shlex
from typing import ClassVar, Final

_REST: Final = "…"  # the reader fills it in


def command(*words: object) -> str:
    """The words as one shell command, for a message that offers it: a mount point may be called `it's a run`, and unquoted
    advice might clear, or create, another directory. `…` stands for a part that the reader adds and stays unquoted.
    """
    return " ".join(word if word == _REST else shlex.quote(word) for word in map(str, words))


class StepfsError(Exception):
    """Something failed; the message is one line with advice."""

    exit_code: ClassVar[int] = 1
    several_lines: ClassVar[bool] = False  # each line of the message is complete by itself


class UsageError(StepfsError):
    """The call is wrong (a value, a size, a combination of options): correct it and call again."""

    exit_code = 2


class WrongTypeError(UsageError, TypeError):
    """An argument of the Python API has a wrong type. Correct the call."""


class MissingPackageError(UsageError, ImportError):
    """A package that only an extra brings is not installed: install the extra that the message names."""


class PayloadTypeError(WrongTypeError):
    """The appended object is no payload: pass bytes."""


class ClosedError(UsageError, ValueError):
    """The `Lake` was closed. Open another one."""


class AbsentError(StepfsError):
    """A named lake, bucket, directory or object does not exist: name another, or create it first."""

    exit_code = 3


class NoSuchGroupError(AbsentError):
    """The lake has no consumer group of that name, or it was retired: name another, or make a new one."""


class ReclaimedError(AbsentError):
    """The steps were reclaimed during the request: no kept checkpoint needs them. Continue with live steps."""


class NoSuchStepError(AbsentError, IndexError):
    """The step, or the rank, is not there: not committed (yet), beyond a sealed end, or outside the view. Wait for it,
    or name another.
    """


class WaitExpiredError(StepfsError, TimeoutError):
    """The step was not committed within the deadline. Look at the producers, or wait again."""


class RefusedError(StepfsError):
    """Refused to protect data or a running process (lake exists, mount busy, store unfit, no right)."""

    exit_code = 4


class NewerFormatError(RefusedError):
    """The object was written by a newer stepfs: upgrade this one. Nothing was changed."""


class ArchivedError(RefusedError):
    """The object lies in an archive class. Restore it with the store's own tool; all others can be read."""


class SealedError(RefusedError):
    """The lake is sealed: no more steps will come, on purpose. Stop producing."""


class WithdrawnError(RefusedError):
    """A checkpoint needs steps that are reclaimed; the record was withdrawn. Resume from a later one.

    `late`: the next steps of the checkpoints that came too late.
    """

    def __init__(self, message: str, late: frozenset[int] = frozenset()) -> None:
        super().__init__(message)
        self.late = late


class CorruptError(StepfsError):
    """Stored bytes differ from the committed ones: restore the object, or fork the lake around it."""

    exit_code = 5


class OtherHistoryError(CorruptError):
    """The log is not the one that was read here: the store was rolled back, or lost objects. Begin again from what it
    has now: mount again, restart the process.
    """


class StoreUnreachableError(StepfsError):
    """The store did not answer within its deadline. Nothing is known to be lost: try again later."""

    exit_code = 6


class StoreSilentError(StoreUnreachableError):
    """The store has been silent for as long as the caller was willing to wait: end, and try again later."""


class FencedError(StepfsError):
    """A newer incarnation of this producer id is live. Stop; a supervisor must not restart this process."""

    exit_code = 7


class DifferentError(StepfsError):
    """What was made again differs from what is there."""

    exit_code = 8


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside nested groups, in the order they were raised; groups are never empty."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


# "Do not restart" first, then damage, then errors for a person to decide; a retry helps only with the last.
_MOST_SEVERE_FIRST: Final = (FencedError, CorruptError, RefusedError, AbsentError, UsageError, StoreUnreachableError)


def severity(error: StepfsError) -> int:
    """0 is the most severe."""
    ranks = [rank for rank, kind in enumerate(_MOST_SEVERE_FIRST) if isinstance(error, kind)]
    return ranks[0] if ranks else len(_MOST_SEVERE_FIRST)


def leading_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception in the group that decides how a program continues, to be raised alone."""
    found = leaves(group)
    interruptions = [leaf for leaf in found if isinstance(leaf, KeyboardInterrupt)]
    known = [leaf for leaf in found if isinstance(leaf, StepfsError)]
    return interruptions[0] if interruptions else min(known, key=severity) if known else found[0]
