"""The environment variables that stores of any kind read: for a diagnosis elsewhere, and for the secrets that no log may show."""

from __future__ import annotations

from typing import Final

from stepfs.store.cloud import settings as cloud
from stepfs.store.s3 import settings as s3

PREFIXES: Final = (*s3.PREFIXES, *cloud.PREFIXES)
SECRETS: Final = (*s3.SECRETS, *cloud.SECRETS)
