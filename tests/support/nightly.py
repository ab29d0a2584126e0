"""What nightly tests alone need, which `scripts/setup` leaves out: a test fails without it, in one line."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs(what: str, *, there: bool | None = None) -> None:
    """`what` is a module, unless it is said whether it is there."""
    if not (find_spec(what) if there is None else there):
        pytest.fail(f"no {what} here: run scripts/setup --nightly", pytrace=False)
