"""The versions that decide how stepfs behaves here: its own, those of Python, kernel, libfuse and the libraries.

The libraries are the ones that this installation declares, so a new dependency appears without a change here.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs import __version__

_ANSWER_S: Final = 10.0
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA: Final = re.compile(r"extra == ['\"]([^'\"]+)['\"]")
_LIBFUSE: Final = re.compile(r"(/.*/libfuse3[^/]*\.so[^/]*)$")


@dataclass(frozen=True, slots=True)
class Library:
    """A declared dependency: its installed version, or None, and the extra that brings it, if one does."""

    name: str
    version: str | None
    extra: str | None


@dataclass(frozen=True, slots=True)
class Versions:
    """The document of `stepfs version`. None: not installed, or without a version."""

    stepfs: str
    python: str
    executable: str
    kernel: str
    machine: str
    libfuse: str | None
    fusermount3: str | None
    libraries: list[Library]


def versions() -> Versions:
    """The versions here. Starts `fusermount3` and loads pyfuse3, if they are there."""
    return Versions(
        stepfs=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        kernel=os.uname().release,
        machine=os.uname().machine,
        libfuse=libfuse(),
        fusermount3=fusermount3(),
        libraries=libraries(),
    )


def libraries() -> list[Library]:
    """The declared dependencies, required ones first; none if stepfs is not installed as a package."""
    try:
        declared = importlib.metadata.requires("stepfs") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    extras_of: defaultdict[str, list[str | None]] = defaultdict(list)
    for requirement in declared:
        name, extra = _NAME.match(requirement), _EXTRA.search(requirement)
        if name is not None and name[0] != "stepfs":  # an extra that includes another one
            extras_of[name[0]].append(extra[1] if extra else None)
    members = Counter(extra for extras in extras_of.values() for extra in extras if extra)
    found = [
        # Of the extras that bring it, the one that brings the least besides.
        Library(
            name,
            _installed(name),
            None if None in extras else min(filter(None, extras), key=members.__getitem__),
        )
        for name, extras in extras_of.items()
    ]
    return sorted(found, key=lambda library: (library.extra is not None, library.name.lower()))


def libfuse() -> str | None:
    """The version of the library that pyfuse3 loads: a wheel of pyfuse3 may bring its own."""
    try:
        importlib.import_module("pyfuse3")
        for line in Path("/proc/self/maps").read_text().splitlines():
            if mapped := _LIBFUSE.search(line):
                library = ctypes.CDLL(mapped[1])
                library.fuse_pkgversion.restype = ctypes.c_char_p
                version: bytes = library.fuse_pkgversion()
                return version.decode()
    except (ImportError, OSError, AttributeError):
        pass
    return None


def fusermount3() -> str | None:
    """The version of the helper on the path with which users mount."""
    program = shutil.which("fusermount3")
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603 (a fixed program)
            [program, "--version"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"\d+(\.\d+)+", done.stdout)
    return version[0] if version else None


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
