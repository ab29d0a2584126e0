"""`.stepfs/order/`: a trainer announces the order in which it will open steps, by looking up a name.

The mount is read-only for the kernel too, so no process can write there. Any container that sees the mount can look
names up, and the kernel gives the user of each request. `data/prefetch/order_hint` defines the names.
"""

from __future__ import annotations

import errno
import logging
import os

import pyfuse3

from stepfs.data.prefetch.order_hint import parse_hint
from stepfs.data.prefetch.prefetcher import Prefetcher
from stepfs.errors import UsageError

_log = logging.getLogger("stepfs.mount")


def take_hint(prefetcher: Prefetcher, name: bytes, uid: int) -> None:
    """Accept the hint, or raise an errno: EACCES for users other than root and the mounting user, ENOENT for no hint."""
    try:
        hint = parse_hint(name.decode("ascii"))
    except (UsageError, UnicodeDecodeError):
        raise pyfuse3.FUSEError(errno.ENOENT) from None
    if uid not in {0, os.getuid()}:
        raise pyfuse3.FUSEError(errno.EACCES)
    try:
        prefetcher.accept(hint)
    except UsageError as error:
        _log.info("order hint refused: %s", error)
        raise pyfuse3.FUSEError(errno.EINVAL) from None
