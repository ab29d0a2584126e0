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
import re
import zipfile
from collections.abc import Iterator
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

    `AbsentError` if the directory does not exist: not the same as "all checkpoints were deleted".
    """
    if not place.directory.is_dir():
        raise AbsentError(f"checkpoint directory {place.directory} does not exist (yet)")
    if place.pattern is not None:
        return frozenset(_matching(place.directory, place.pattern))
    finders = (_torch_dcp, _hugging_face, _lightning, _megatron)
    return frozenset(counter for finder in finders for counter in finder(place.directory))


def _torch_dcp(directory: Path) -> Iterator[int]:
    for metadata in directory.glob("*/.metadata"):
        counter = _LAST_NUMBER.search(metadata.parent.name)
        if counter is not None and metadata.stat().st_size > 0:
            yield int(counter[1])


def _hugging_face(directory: Path) -> Iterator[int]:
    for path in directory.glob("checkpoint-*/trainer_state.json"):
        counter = _HUGGING_FACE.fullmatch(path.parent.name)
        if counter is None:
            continue
        try:
            state = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # still being written
        if isinstance(state, dict) and state.get("global_step") == int(counter[1]):
            yield int(counter[1])


def _lightning(directory: Path) -> Iterator[int]:
    for path in directory.glob("*.ckpt"):
        counter = _LIGHTNING.search(path.name)
        if counter is not None and path.is_file() and zipfile.is_zipfile(path):
            yield int(counter[1])


def _megatron(directory: Path) -> Iterator[int]:
    try:
        latest = int((directory / _MEGATRON_LATEST).read_text())
    except (OSError, ValueError):
        return
    for path in directory.glob("iter_*/"):
        counter = _MEGATRON.fullmatch(path.name)
        if counter is not None and int(counter[1]) <= latest:
            yield int(counter[1])


def _matching(directory: Path, pattern: str) -> Iterator[int]:
    before, _, after = pattern.partition(_PLACE)
    wanted = re.compile(f"{re.escape(before)}(\\d{{1,15}}){re.escape(after)}")
    depth = len(Path(pattern).parts)
    for path in directory.glob("/".join(["*"] * depth)):
        found = wanted.fullmatch(str(path.relative_to(directory)))
        if found is not None:
            yield int(found[1])
