"""Checkpoint directories: which checkpoints are complete, in the layouts of usual trainers, and the step each resumes at.

Only *complete* checkpoints count: a step that an incomplete checkpoint "covers" might be deleted. Reads directories and
files only; call it in a worker thread. Entries that this user may not read are reported separately.
"""

from __future__ import annotations

import ast
import errno
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from stepfs.errors import AbsentError, UsageError
from stepfs.format.ids import INTEGER_MAX, Step

_TEXT_MAX: Final = 64
_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

_LAST_NUMBER: Final = re.compile(r"(\d{1,15})(?!.*\d)")
_HUGGING_FACE: Final = re.compile(r"checkpoint-(\d{1,15})")
_LIGHTNING: Final = re.compile(r"step=(\d{1,15}).*\.ckpt\Z", re.DOTALL)
_MEGATRON: Final = re.compile(r"iter_(\d{1,15})")
_MEGATRON_LATEST: Final = "latest_checkpointed_iteration.txt"
_PLACE: Final = "{N}"
_ARCHIVE_END_BYTES: Final = 1 << 12  # read by every node from each archive every second
_END_RECORD: Final = b"PK\x05\x06"
_END_RECORD_BYTES: Final = 22
_BARRED: Final = {errno.EACCES, errno.EPERM, errno.ELOOP}

# Counter, and a test of completeness; OSError if the test fails.
Candidate = tuple[int, Callable[[], bool]]


class NextStep:
    """The parsed `--next-step`, from a trainer's counter to the first step still needed: integers, N, + - * // and ().

    Explicit, because off-by-one here loses data: a checkpoint named 100 may have consumed steps 0…99 (next is N) or 0…100
    (N+1), and a counter of optimizer steps with gradient accumulation 4 means N*4. Nothing is guessed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text[:_TEXT_MAX].strip(), mode="eval") if len(text) <= _TEXT_MAX else None
        except (SyntaxError, ValueError):
            tree = None
        if tree is None:
            raise self._bad()
        self._evaluate = self._compile(tree.body)
        self(1)

    def __call__(self, counter: int) -> Step:
        """The first step that the checkpoint with this counter needs. `UsageError` if the result is no step."""
        try:
            value = self._evaluate(counter)
        except ZeroDivisionError:
            raise self._bad() from None
        if not 0 <= value <= INTEGER_MAX:
            raise UsageError(f"--next-step {self.text!r} makes {value} of checkpoint {counter}, which is no step")
        return Step(value)

    def _compile(self, node: ast.expr) -> Callable[[int], int]:
        match node:
            case ast.Name(id="N"):
                return lambda counter: counter
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return lambda _: number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                one, two, combine = self._compile(left), self._compile(right), _OPERATORS[type(op)]
                return lambda counter: combine(one(counter), two(counter))
            case _:
                raise self._bad()

    def _bad(self) -> UsageError:
        return UsageError(f"--next-step {self.text!r}: write an expression of N such as N, N+1 or N*4")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory, and for other than the known layouts a pattern below it."""

    directory: Path
    pattern: str | None = None

    @classmethod
    def parse(cls, text: str) -> Place:
        """`/ckpts` or `/ckpts/run-{N}/DONE`. `UsageError` for more than one `{N}`."""
        if _PLACE not in text:
            return cls(Path(text))
        if text.count(_PLACE) > 1:
            raise UsageError(f"--checkpoint-dir {text!r}: write {_PLACE} once, where the counter is")
        parts = Path(text).parts
        fixed = next(number for number, part in enumerate(parts) if _PLACE in part)
        return cls(Path(*parts[:fixed]), str(Path(*parts[fixed:])))


@dataclass(frozen=True, slots=True)
class Found:
    """Counters, in the trainer's own unit."""

    complete: frozenset[int]
    barred: frozenset[int]  # counters of entries that this user may not read
    entry: str = ""  # the name of one entry that is not hidden, if there is any

    def unknown_layout(self, place: Place) -> str:
        """What to say of a directory that holds something and no checkpoint; '' of any other."""
        if self.complete or self.barred or not self.entry:
            return ""
        known = "torch DCP, Hugging Face, Lightning, Megatron" if place.pattern is None else place.pattern
        return (
            f"{place.directory} holds {self.entry!r} and no complete checkpoint ({known}); of another layout give the path of a "
            f"file that it writes last, as --checkpoint-dir '{place.directory}/run-{_PLACE}/DONE'"
        )


def look(place: Place) -> Found:
    """The checkpoints that exist now. Each layout has its own sign of completeness.

    It is the object that its writer writes last:

        torch DCP      <name-with-counter>/.metadata     torch.distributed.checkpoint writes it after every shard
        Hugging Face   checkpoint-<N>/trainer_state.json whose global_step is N
        Lightning      *step=<N>*.ckpt                   a readable zip archive (its directory is at the end)
        Megatron       iter_<N>/ with N at most the number in latest_checkpointed_iteration.txt
        a pattern      any path with `{N}` in it, such as run-{N}/DONE: there when the file is there

    `AbsentError` if the directory does not exist: not the same as "all checkpoints were deleted". OSError if it cannot
    be read, or the file system fails: an unreachable checkpoint must not look like a deleted one. (Hence no `glob`,
    which silently skips directories that it may not list.)
    """
    try:
        names = [path.name for path in place.directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentError(f"checkpoint directory {place.directory} does not exist (yet)") from error
    complete, barred = set(), set()
    for counter, is_complete in _candidates(place, names):
        try:
            if is_complete():
                complete.add(counter)
        except OSError as error:
            if error.errno not in _BARRED:
                raise
            barred.add(counter)
    return Found(
        frozenset(complete), frozenset(barred - complete), min((name for name in names if name[0] != "."), default="")
    )


def _candidates(place: Place, names: Sequence[str]) -> Iterator[Candidate]:
    directory = place.directory
    if place.pattern is not None:
        first, *rest = Path(place.pattern).parts
        before, _, after = first.partition(_PLACE)
        wanted = re.compile(f"{re.escape(before)}(\\d{{1,15}}){re.escape(after)}")
        for number, name in _counted(names, wanted.fullmatch):
            yield number, partial(_is_there, directory.joinpath(name, *rest))
        return
    for number, name in _counted(names, _LAST_NUMBER.search):
        yield number, partial(lambda path: bool(_size(path)), directory / name / ".metadata")
    for number, name in _counted(names, _HUGGING_FACE.fullmatch):
        yield number, partial(_is_state_of_step, directory / name / "trainer_state.json", number)
    for number, name in _counted(names, _LIGHTNING.search):
        yield number, partial(_is_archive, directory / name)
    if _MEGATRON_LATEST in names:
        latest = _number(_bytes(directory / _MEGATRON_LATEST))
        for number, name in _counted(names, _MEGATRON.fullmatch):
            if number <= latest:
                yield number, partial(_is_there, directory / name)


def _counted(names: Iterable[str], match: Callable[[str], re.Match[str] | None]) -> Iterator[tuple[int, str]]:
    """The names that match, each with its counter."""
    return ((int(found[1]), name) for name in names if (found := match(name)))


def _number(text: bytes | None) -> int:
    """-1 for another layout, or "release"."""
    try:
        return int(text or b"")
    except ValueError:
        return -1


def _is_there(path: Path) -> bool:
    return _size(path) is not None


def _is_state_of_step(path: Path, step: int) -> bool:
    text = _bytes(path)
    try:
        state = json.loads(text or b"")
    except ValueError:
        return False  # still being written
    return isinstance(state, dict) and state.get("global_step") == step


def _is_archive(path: Path) -> bool:
    end = _bytes(path, last=_ARCHIVE_END_BYTES)
    return end is not None and _ends_an_archive(end)


def _ends_an_archive(end: bytes) -> bool:
    """Whether a zip archive is whole: its end record, then the comment of the announced length, then nothing.

    Not `zipfile.is_zipfile`: it reports a failing read as "no archive", and later versions of it read the directory.
    """
    at = end.rfind(_END_RECORD)
    comment = int.from_bytes(end[at + _END_RECORD_BYTES - 2 : at + _END_RECORD_BYTES], "little")
    return at >= 0 and len(end) == at + _END_RECORD_BYTES + comment


def _size(path: Path) -> int | None:
    """Size of the file at `path` in bytes, None if there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _bytes(path: Path, *, last: int | None = None) -> bytes | None:
    """The content of a file, or its `last` bytes; None if there is none."""
    try:
        with path.open("rb") as file:
            if last is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - last))
            return file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
