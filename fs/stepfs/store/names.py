"""The check of keys: bad ones are refused here, before any store turns a name into a path or a URL.

Stores receive keys from decoded objects, too (descriptors contain them), so a hostile key must not leave the lake: no
empty, '.' or '..' component, no hidden name (the local store keeps its temporary files in a hidden directory), no
character that a URL or a file system would rewrite.
"""

from __future__ import annotations

import re
from typing import Final

from stepfs.errors import UsageError

_KEY: Final = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9_=.-]*/)*[A-Za-z0-9_=-][A-Za-z0-9_=.-]*")
_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9_=-][A-Za-z0-9_=.-]*/)*(?:[A-Za-z0-9_=-][A-Za-z0-9_=.-]*)?")
KEY_BYTES_MAX: Final = 512


def check_key(key: str) -> str:
    """Returns `key`; `UsageError` if it is not a relative object name."""
    if len(key) > KEY_BYTES_MAX or _KEY.fullmatch(key) is None:
        raise UsageError(f"not an object key: {key[:80]!r}; keys are relative paths of plain components")
    return key


def check_prefix(prefix: str) -> str:
    """Returns `prefix` ('' lists everything); `UsageError` if no key could start with it."""
    if len(prefix) > KEY_BYTES_MAX or _PREFIX.fullmatch(prefix) is None:
        raise UsageError(f"not a key prefix: {prefix[:80]!r}; prefixes are relative paths of plain components")
    return prefix
