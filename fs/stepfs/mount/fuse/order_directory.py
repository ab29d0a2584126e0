"""`.stepfs/order/`: where a trainer says in which order it will open steps. Looking a name up says it.

The mount is read-only for the kernel too, so nothing can be written there; names can be looked up from any container that
sees the mount, and the kernel says for whom. What the names mean is in `data/order_hint`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Protocol

import pyfuse3

from stepfs.data.prefetch.order_hint import Hint, parse_hint
from stepfs.errors import UsageError
from stepfs.mount.documents import Json, render

_log = logging.getLogger("stepfs.mount")


class HintTaker(Protocol):
    """`stepfs.data.prefetch.prefetcher.Prefetcher`."""

    def accept(self, hint: Hint) -> None: ...


class OrderDirectory:
    """The door for hints of one mount."""

    def __init__(self, taker: HintTaker, describe: Callable[[], Json]) -> None:
        self._taker = taker
        self._describe = describe
        self._allowed = {0, os.getuid()}

    def look_up(self, name: bytes, uid: int) -> None:
        """Take the hint, or an errno: EACCES for others than root and who mounted, ENOENT for what is no hint."""
        try:
            hint = parse_hint(name.decode("ascii"))
        except (UsageError, UnicodeDecodeError):
            raise pyfuse3.FUSEError(errno.ENOENT) from None
        if uid not in self._allowed:
            raise pyfuse3.FUSEError(errno.EACCES)
        try:
            self._taker.accept(hint)
        except UsageError as error:
            _log.info("order hint refused: %s", error)
            raise pyfuse3.FUSEError(errno.EINVAL) from None

    def content(self) -> bytes:
        """What a file that was accepted says when it is read."""
        return render(self._describe()).encode()
