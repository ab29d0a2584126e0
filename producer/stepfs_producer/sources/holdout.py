"""Which records a run leaves out: those held out for validation, by a hash of their content, those of other shards, and those
that the plan excludes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepfs.errors import AbsentError, UsageError
from stepfs_producer.plan.values import Document, documents
from stepfs_producer.sources.record import SourceSpec, Tokens

if TYPE_CHECKING:
    from stepfs_producer.plan.model import Plan

_HOLDOUT: Final = b"stepfs-holdout1\0"  # 16 bytes, as blake2b wants a `person`
_DOCUMENTS_MAX: Final = 100_000  # each task of a worker has them
_SHARD: Final = b"stepfs-shard---1"


def is_of_this_run(spec: SourceSpec, value: bytes | Tokens) -> bool:
    """Whether a record is on this run's side of the holdout, and in its shard."""
    source = spec.source
    if source.holdout and is_held_out(value, source.holdout) != spec.held_out:
        return False
    index, count = source.dealt
    return count == 1 or _hash(value, _SHARD) % count == index


def document_of(spec: SourceSpec, file: str, offset: int, value: bytes | Tokens) -> Document | None:
    """What the plan calls a record that it excludes; None: it does not."""
    digests, records = _looked_up(spec.exclude)
    if offset in records.get(file, ()):
        return spec.name, file, offset
    if not digests:
        return None
    digest = hashlib.sha256(value.ids if isinstance(value, Tokens) else value).hexdigest()
    return digest if digest in digests else None


@lru_cache(maxsize=8)
def _looked_up(documents: tuple[Document, ...]) -> tuple[frozenset[str], Mapping[str, set[int]]]:
    records: dict[str, set[int]] = {}
    for one in documents:
        if not isinstance(one, str):
            records.setdefault(one[1], set()).add(one[2])
    return frozenset(one for one in documents if isinstance(one, str)), records


def with_documents(plan: Plan, directory: str) -> Plan:
    """The plan with the documents in place of the file that names them, so that its digest and its kept text have them.

    `AbsentError`, `UsageError` for a file that cannot be read, or names none.
    """
    if not isinstance(plan.exclude, str):
        return plan
    path = Path(directory) / Path(plan.exclude).expanduser()
    found: list[Document] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise AbsentError(f"exclude: {path}: no such file; name a file of documents, or remove the key") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"exclude: {path}: {error}; name a readable file of documents") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                one = json.loads(line)
                found += documents([one["sha256"] if "sha256" in one else [one["source"], one["file"], one["record"]]])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                form = '{"source": …, "file": …, "record": …} or {"sha256": …}'
                raise UsageError(f"exclude: {path}:{number}: names no document; write {form}") from error
    if not found or len(found) > _DOCUMENTS_MAX:
        raise UsageError(f"exclude: {path} names {len(found)} documents; name 1 to {_DOCUMENTS_MAX}, or remove the key")
    return plan.changed(exclude=documents(found))


def is_held_out(value: bytes | Tokens, share: Fraction) -> bool:
    """Whether a record is on the side of the holdout, in any epoch and place."""
    return _hash(value, _HOLDOUT) * share.denominator < share.numerator << 64


def _hash(value: bytes | Tokens, purpose: bytes) -> int:
    """A hash of 64 bits of the record's bytes, another one for each purpose."""
    data = value.ids if isinstance(value, Tokens) else value
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=purpose).digest(), "little")
