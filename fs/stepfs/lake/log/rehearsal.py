"""The last check of a commit before it is created: decode its bytes as every reader will, on the same head.

Readers are strict and a log slot is permanent, so one commit that they refuse ends a lake. Every commit of every
writer passes this check; encoders of all other objects decode their own result (`codec.readable`).
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
