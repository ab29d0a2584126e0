"""Botocore's descriptions of S3, read once per process: parsing them is most of the tenth of a second that a client costs.

Every store that a test opens makes a client or two, each from a session of its own that would read them again.
"""

from __future__ import annotations

import functools


def share() -> None:
    """All sessions of this process use one loader from now on."""
    import botocore.session  # noqa: PLC0415 - half a second that tests without a server should not pay

    create = botocore.session.create_loader
    if not hasattr(create, "cache_info"):
        botocore.session.create_loader = functools.cache(create)
