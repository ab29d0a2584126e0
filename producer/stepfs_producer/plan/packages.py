"""The packages that plans need: those of `stepfs[produce]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stepfs.errors import MissingPackageError

_PACKAGES: Final = {"trio_parallel": "trio-parallel", "yaml": "PyYAML"}


@contextmanager
def plan_packages() -> Iterator[None]:
    """Around imports that plans need, or a decorator of their commands. `MissingPackageError`: one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = _PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise MissingPackageError(
            f"plans need the package {package}, which is not installed: pip install 'stepfs[produce]'"
        ) from error
