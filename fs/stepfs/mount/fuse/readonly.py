"""Everything that would change something: EROFS, in one place.

The kernel refuses most of this itself on a mount with `ro`; what still arrives gets the same answer. `getxattr`,
`listxattr`, `flush`, `fsync` and `poll` stay as pyfuse3 has them: ENOSYS once, and the kernel never asks again.
"""

from __future__ import annotations

import errno
from typing import Final, NoReturn, TypeVar

import pyfuse3

CHANGES: Final = (
    "setattr",
    "mknod",
    "mkdir",
    "unlink",
    "rmdir",
    "symlink",
    "rename",
    "link",
    "create",
    "write",
    "setxattr",
    "removexattr",
)
_Operations = TypeVar("_Operations", bound=type[pyfuse3.Operations])


def read_only(cls: _Operations) -> _Operations:
    """Class decorator: every handler that would change something refuses."""
    for name in CHANGES:
        assert hasattr(pyfuse3.Operations, name)
        setattr(cls, name, _refuse)
    return cls


async def _refuse(_self: pyfuse3.Operations, *_args: object) -> NoReturn:
    raise pyfuse3.FUSEError(errno.EROFS)
