"""Python, packages, FUSE and the rights to use it.

Every check takes the root of the file system as an argument, so that tests can simulate other machines.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepfs import __version__
from stepfs.command_hint import command
from stepfs.doctor.finding import Finding, fail, note, ok
from stepfs.mount.host.abort import CAP_SYS_ADMIN, capabilities

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA: Final = re.compile(r"extra == ['\"]([^'\"]+)['\"]")


@dataclass(frozen=True, slots=True)
class Library:
    """A declared dependency: its installed version, or None, and the extra that brings it, if one does."""

    name: str
    version: str | None
    extra: str | None


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


def check_python() -> Iterator[Finding]:
    """Stepfs itself, the interpreter, and the packages that stepfs declares."""
    yield ok("stepfs", __version__)
    yield ok("python", f"{platform.python_version()} at {sys.executable}")
    missing = [library for library in libraries() if library.version is None]
    required = [library.name for library in missing if library.extra is None]
    if required:
        remedy = "pip install stepfs, in the environment that runs it"
        yield fail("packages", f"not installed: {', '.join(required)}", remedy)
    else:
        yield ok("packages", "all that stepfs needs are installed")
    for extra in sorted({library.extra for library in missing if library.extra}):
        names = ", ".join(library.name for library in missing if library.extra == extra)
        yield note(
            f"extra {extra}",
            f"not installed: {names}",
            f"only what says so needs it: pip install 'stepfs[{extra}]'",
        )


def check_pyfuse3() -> Finding:
    """Import pyfuse3: the only test for its shared library."""
    try:
        importlib.import_module("pyfuse3")
    except ImportError as error:
        return fail(
            "pyfuse3",
            f"does not import: {error}",
            "install libfuse 3 (Debian: apt-get install libfuse3-3), then pip install --force-reinstall pyfuse3",
        )
    return ok("pyfuse3", "imports")


def check_fuse_device(root: Path = Path("/")) -> Finding:
    """/dev/fuse must exist, and this user must be able to open it."""
    device = root / "dev/fuse"
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        remedy = "load the kernel module (modprobe fuse); in a container add --device /dev/fuse"
        return fail("/dev/fuse", "does not exist", remedy)
    except OSError as error:
        remedy = "run as root, or in a container add --device /dev/fuse and --cap-add SYS_ADMIN"
        return fail("/dev/fuse", f"cannot be opened: {error.strerror}", remedy)
    return ok("/dev/fuse", "can be opened")


def check_fusermount(*, is_root: bool, path: str | None = None) -> Finding:
    """The set-uid helper with which users mount; root needs it only to unmount by hand."""
    found = shutil.which("fusermount3", path=path)
    remedy = "install it (Debian: apt-get install fuse3)"
    if found is None:
        if is_root:
            return note("fusermount3", "not installed; root mounts without it", remedy)
        return fail("fusermount3", "not installed", remedy)
    if not is_root and not Path(found).stat().st_mode & stat.S_ISUID:
        return fail("fusermount3", f"{found} is not set-uid root", f"as root: {command('chmod', 'u+s', found)}")
    return ok("fusermount3", found)


def check_mtab(*, is_root: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """fusermount3 finds the mount in /etc/mtab before it unmounts. A slim image may lack it: it mounts, but never unmounts."""
    if not is_root and not (root / "etc/mtab").exists():
        remedy = f"in the image: {command('ln', '-s', '/proc/mounts', '/etc/mtab')}"
        yield fail("/etc/mtab", "does not exist: fusermount3 could not unmount", remedy)


def check_rights(*, is_root: bool, root: Path = Path("/")) -> Finding:
    """The right to mount, and to let other users in. A set-uid helper cannot exceed the capability bounding set."""
    held = capabilities("CapEff" if is_root else "CapBnd", root)
    if held is not None and not held & CAP_SYS_ADMIN:
        return fail(
            "rights",
            f"{'root' if is_root else 'user'}: may not mount, CAP_SYS_ADMIN was taken from this process",
            "in a container add --cap-add SYS_ADMIN (Kubernetes: privileged), or serve a mount that was made outside: "
            "stepfs mount LAKE /dev/fd/N",
        )
    if is_root:
        return ok("rights", "root: may mount, tune read-ahead, and allow others in")
    try:
        lines = (root / "etc/fuse.conf").read_text().split("\n")
    except OSError:
        lines = []
    if "user_allow_other" in {line.strip() for line in lines}:
        return ok("rights", "user: may mount through fusermount3 and use --allow-other")
    return note(
        "rights",
        "user: may mount through fusermount3, not with --allow-other",
        "if other users must read the mount, add user_allow_other to /etc/fuse.conf",
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
