"""Python, packages, FUSE and the rights to use it.

Every check takes the root of the file system as an argument, so that tests can simulate other machines.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stepfs.command_hint import command
from stepfs.doctor.finding import Finding, fail, note, ok

_CAP_SYS_ADMIN: Final = 1 << 21
_REQUIRED: Final = ("boto3", "crc32c", "msgpack", "trio")
_OPTIONAL: Final = {
    "torch": "only `.pt` payloads need it: pip install 'stepfs[torch]'",
    "safetensors": "only `stepfs-produce text --ext .safetensors` needs it: pip install 'stepfs[text]'",
    "tokenizers": "only `stepfs-produce text` with BPE tokens needs it: pip install 'stepfs[text]'",
}


def check_python() -> Iterator[Finding]:
    """Interpreter and packages."""
    yield ok("python", f"{platform.python_version()} at {sys.executable}")
    for package in _REQUIRED:
        version = _version(package)
        if version is None:
            yield fail(package, "not installed", "pip install stepfs, in the environment that runs it")
        else:
            yield ok(package, version)
    for package, remedy in _OPTIONAL.items():
        version = _version(package)
        yield note(package, "not installed", remedy) if version is None else ok(package, version)


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
    return ok("pyfuse3", _version("pyfuse3") or "imports")


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
        return fail(
            "fusermount3", f"{found} is not set-uid root", f"as root: {command('chmod', 'u+s', found)}"
        )
    return ok("fusermount3", found)


def check_mtab(*, is_root: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """fusermount3 looks up in /etc/mtab what it unmounts. A slim container may lack it: it mounts, but never unmounts."""
    if not is_root and not (root / "etc/mtab").exists():
        remedy = f"in the image: {command('ln', '-s', '/proc/mounts', '/etc/mtab')}"
        yield fail("/etc/mtab", "does not exist: fusermount3 could not unmount", remedy)


def check_rights(*, is_root: bool, root: Path = Path("/")) -> Finding:
    """The right to mount, and to let other users in. A set-uid helper cannot exceed the capability bounding set."""
    held = _capabilities(root, "CapEff" if is_root else "CapBnd")
    if held is not None and not held & _CAP_SYS_ADMIN:
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


def _capabilities(root: Path, which: str) -> int | None:
    """One of this process's capability sets as bits; None if the kernel does not show it."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        return next((int(line.split()[1], 16) for line in lines if line.startswith(f"{which}:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
