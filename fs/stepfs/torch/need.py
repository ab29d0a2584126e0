"""Whether an installed package will do; advice if not. Nothing is imported for the answer."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.util import find_spec
from typing import Final

from stepfs.errors import MissingPackageError

# Older `weights_only` unpicklers can be made to run a file's code: CVE-2025-32434 (before 2.6), CVE-2026-24747
# (before 2.10). And 2.11 is the first that surely reads no values for the device "meta" (pytorch 170619).
_SAFE: Final = (2, 11)


def need(package: str, extra: str, what: str) -> None:
    """`MissingPackageError` if a package that an extra brings is not installed."""
    if find_spec(package) is None:
        raise MissingPackageError(
            f"{what} needs the package {package}, which is not installed: pip install 'stepfs[{extra}]'"
        )


def need_torch(what: str, *, for_foreign_files: bool = False) -> None:
    """`MissingPackageError` if torch is not installed, or too old for files that others wrote."""
    need("torch", "torch", what)
    installed = version("torch")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if for_foreign_files and (numbers is None or tuple(map(int, numbers.groups())) < _SAFE):
        raise MissingPackageError(
            f"{what} needs torch {'.'.join(map(str, _SAFE))} or newer, which unpickles safely; this is {installed}: "
            "pip install --upgrade 'stepfs[torch]'"
        )
