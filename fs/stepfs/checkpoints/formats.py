"""Which complete checkpoints a directory holds, in the layouts that trainers write unasked.

Only *complete* checkpoints count, because a step that a torn checkpoint "covers" may be deleted. Each layout has its own
sign of completeness, the thing its writer writes last:

    torch DCP      <name-with-counter>/.metadata     torch.distributed.checkpoint writes it after every shard
    Hugging Face   checkpoint-<N>/trainer_state.json whose global_step is N
    Lightning      *step=<N>*.ckpt                   a readable zip archive (its directory is at the end)
    Megatron       iter_<N>/ with N at most what latest_checkpointed_iteration.txt says
    a pattern      any path with `{N}` in it, such as run-{N}/DONE: there when the file is there

Reads directories only; call it in a worker thread.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs.errors import AbsentError, UsageError

_LAST_NUMBER: Final = re.compile(r"(\d{1,15})(?!.*\d)")
_HUGGING_FACE: Final = re.compile(r"checkpoint-(\d{1,15})")
_LIGHTNING: Final = re.compile(r"step=(\d{1,15})")
_MEGATRON: Final = re.compile(r"iter_(\d{1,15})")
_MEGATRON_LATEST: Final = "latest_checkpointed_iteration.txt"
_PLACE: Final = "{N}"
_ARCHIVE_END_BYTES: Final = 1 << 12  # every node reads so much of each archive every second
_END_RECORD: Final = b"PK\x05\x06"
_END_RECORD_BYTES: Final = 22


@dataclass(frozen=True, slots=True)
class Place:
    """Where to look: a directory, and a pattern below it when the layout is none of the known ones."""

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


def complete_counters(place: Place) -> frozenset[int]:
    """Counters of the complete checkpoints that are there now, in the trainer's own unit.

    `AbsentError` if the directory does not exist: not the same as "all checkpoints were deleted". OSError if anything
    cannot be read: a checkpoint that is merely out of reach must not look like one that was deleted. (Hence no `glob`,
    which leaves out what it may not list.)
    """
    try:
        names = [path.name for path in place.directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AbsentError(f"checkpoint directory {place.directory} does not exist (yet)") from error
    if place.pattern is not None:
        return frozenset(_matching(place.directory, names, place.pattern))
    finders = (_torch_dcp, _hugging_face, _lightning, _megatron)
    return frozenset(counter for finder in finders for counter in finder(place.directory, names))


def _torch_dcp(directory: Path, names: Sequence[str]) -> Iterator[int]:
    for name in names:
        counter = _LAST_NUMBER.search(name)
        if counter is not None and _size(directory / name / ".metadata"):
            yield int(counter[1])


def _hugging_face(directory: Path, names: Sequence[str]) -> Iterator[int]:
    for name in names:
        counter = _HUGGING_FACE.fullmatch(name)
        text = _bytes(directory / name / "trainer_state.json") if counter is not None else None
        if counter is None or text is None:
            continue
        try:
            state = json.loads(text)
        except ValueError:
            continue  # still being written
        if isinstance(state, dict) and state.get("global_step") == int(counter[1]):
            yield int(counter[1])


def _lightning(directory: Path, names: Sequence[str]) -> Iterator[int]:
    for name in names:
        counter = _LIGHTNING.search(name)
        if counter is not None and name.endswith(".ckpt"):
            end = _bytes(directory / name, last=_ARCHIVE_END_BYTES)
            if end is not None and _ends_an_archive(end):
                yield int(counter[1])


def _megatron(directory: Path, names: Sequence[str]) -> Iterator[int]:
    text = _bytes(directory / _MEGATRON_LATEST) if _MEGATRON_LATEST in names else None
    try:
        latest = int(text or b"")
    except ValueError:
        return  # another layout, or "release"
    for name in names:
        counter = _MEGATRON.fullmatch(name)
        if counter is not None and int(counter[1]) <= latest and _size(directory / name) is not None:
            yield int(counter[1])


def _matching(directory: Path, names: Sequence[str], pattern: str) -> Iterator[int]:
    first, *rest = Path(pattern).parts
    before, _, after = first.partition(_PLACE)
    wanted = re.compile(f"{re.escape(before)}(\\d{{1,15}}){re.escape(after)}")
    for name in names:
        counter = wanted.fullmatch(name)
        if counter is not None and _size(directory.joinpath(name, *rest)) is not None:
            yield int(counter[1])


def _ends_an_archive(end: bytes) -> bool:
    """Whether a zip archive is whole: its end record, then the comment that this announces, then nothing.

    Not `zipfile.is_zipfile`, which takes a failing read for "not one", and later versions of which read the directory.
    """
    at = end.rfind(_END_RECORD)
    comment = int.from_bytes(end[at + _END_RECORD_BYTES - 2 : at + _END_RECORD_BYTES], "little")
    return at >= 0 and len(end) == at + _END_RECORD_BYTES + comment


def _size(path: Path) -> int | None:
    """Bytes of what is at `path`, None if nothing is."""
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
