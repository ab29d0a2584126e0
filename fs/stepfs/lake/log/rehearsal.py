"""The last look at a commit before it is created: its bytes, read as every reader will read them, on the same head.

Readers are strict and a log slot is for good, so one commit that they refuse ends a lake. Every commit on a head goes
through here, whoever made it; encoders of all other objects read back what they return (`codec.readable`).
"""

from __future__ import annotations

from stepfs.errors import CorruptError, RefusedError
from stepfs.format.commit import Commit, encode_commit
from stepfs.format.snapshot import LogState
from stepfs.lake.log.apply import apply


def rehearsed(head: LogState, commit: Commit) -> bytes:
    """The bytes of `log/<version>`; `RefusedError`, and nothing is written, if readers would stop at them."""
    body = encode_commit(commit)
    try:
        apply(head, commit, body)
    except CorruptError as error:
        raise RefusedError(
            f"a commit that no reader would accept is not written: {error}; report this"
        ) from error
    return body
