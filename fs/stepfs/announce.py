"""Announcing the order in which steps will be opened, from a trainer to a mount: advice that never fails the trainer.

`data/hints` defines the names, SEMANTICS.md describes their meaning.
"""

import errno
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from stepfs._internal.control_files import answer_within
from stepfs.data.announced_orders import LISTED_STEPS_MAX, ShuffledOrder, shuffle_name, steps_names
from stepfs.errors import UsageError
from stepfs.format.ids import INTEGER_MAX, Step

_log = logging.getLogger("stepfs.announce")


def announce_shuffle(directory: str | Path, order: ShuffledOrder, at: int) -> bool:
    """Announce that readers of `directory` are at place `at` of a shuffled order. False if the mount takes no hints
    from this process.
    """
    return _look_up(Path(directory), iter([shuffle_name(order, at)]))


def announce_steps(directory: str | Path, steps: Iterable[int]) -> bool:
    """Announce that readers of `directory` will open these steps in this order; replaces an earlier list.

    At most `LISTED_STEPS_MAX` (131,072) steps; `UsageError` for more, or for a value that is no step number. False if
    the mount takes no hints from this process.
    """
    listed = [_step(step) for step in steps]
    if len(listed) > LISTED_STEPS_MAX:
        raise UsageError(f"{len(listed)} steps: an order lists at most {LISTED_STEPS_MAX}, announce it in parts")
    return _look_up(Path(directory), steps_names(listed))


def announce_file(directory: str | Path, path: str | Path) -> bool:
    """Announce the steps of a text file, one number a line, as `announce_steps` does."""
    words = Path(path).read_text().split()
    bad = next((word for word in words if not (word.isascii() and word.isdigit())), None)
    if bad is not None:
        raise UsageError(f"{path}: {bad!r} is not a step number; write one a line")
    return announce_steps(directory, map(int, words))


def announce_none(directory: str | Path) -> bool:
    """Withdraw the announced order: reading continues in no particular order."""
    return _look_up(Path(directory), iter(["1-none"]))


def _look_up(directory: Path, names: Iterator[str]) -> bool:
    """Look the names up in a thread that may be abandoned: a hanging mount must not hang the trainer's loop as
    well.
    """
    place = directory / ".stepfs/order"

    def look() -> bool:
        for name in names:
            (place / name).stat()
        return True

    answer = answer_within(look)
    if answer is True:
        return True
    why = "no answer" if answer is None else str(answer)
    if isinstance(answer, OSError) and answer.errno == errno.EACCES:
        why = "only the user who mounted it, and root, may say what comes next"
    _log.warning("%s: the order of steps is not announced (%s); reading works, less is fetched ahead", directory, why)
    return False


def _step(value: int) -> Step:
    if not 0 <= value <= INTEGER_MAX:
        raise UsageError(f"{value} is not a step number")
    return Step(value)
