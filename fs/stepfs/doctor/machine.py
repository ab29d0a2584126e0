"""Checks of this machine: its FUSE, rights, memory and packages, and the stepfs mounts that are there.

A problem of a mount that the command does not name is reported, but no failure: it may be another job's.
"""

import enum
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import stat
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from stepfs import __version__
from stepfs._internal.control_files import ANSWER_S, answer_within, read_config, read_status
from stepfs._internal.limits import cgroup_limit
from stepfs.checkpoints.formats import Place, look
from stepfs.doctor.waits import finding as waits_finding
from stepfs.errors import AbsentError, StepfsError, command
from stepfs.mount.host.abort import CAP_SYS_ADMIN, capabilities
from stepfs.mount.host.mount_points import Health, check_health, give_up_command, is_closed, list_within
from stepfs.mount.host.mount_table import FSTYPE, Mounted, mount_at, mounts, real_directory, source_of
from stepfs.mount.launch import trouble_of
from stepfs.mount.logs import log_file

_MEMORY_LOW: Final = 1 << 30
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA: Final = re.compile(r"extra == ['\"]([^'\"]+)['\"]")


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"  # works, but slower or with fewer features
    FAIL = "FAIL"  # a requested feature will not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `exit_code` counts only for a FAIL."""

    level: Level
    subject: str
    detail: str
    remedy: str = ""
    exit_code: int = 1


def ok(subject: str, detail: str) -> Finding:
    return Finding(Level.OK, subject, detail)


def note(subject: str, detail: str, remedy: str) -> Finding:
    return Finding(Level.NOTE, subject, detail, remedy)


def fail(subject: str, detail: str, remedy: str, *, exit_code: int = 1) -> Finding:
    return Finding(Level.FAIL, subject, detail, remedy, exit_code)


def check_kernel(root: Path = Path("/")) -> Iterator[Finding]:
    """Kernel release, and whether a mount can tune its FUSE settings."""
    yield ok("kernel", platform.release())
    if os.access(root / "sys/class/bdi", os.W_OK) and os.geteuid() == 0:
        yield ok("read-ahead", "may be raised per mount (/sys/class/bdi)")
    else:
        yield note(
            "read-ahead",
            "cannot be raised: reads arrive in 128 KiB pieces",
            "mount as root, or have an administrator write read_ahead_kb of the mount's bdi",
        )
    if (root / "sys/fs/fuse/connections").is_dir():
        yield ok("fusectl", "/sys/fs/fuse/connections is there")
    else:
        yield note(
            "fusectl",
            "/sys/fs/fuse/connections is not mounted: a hung mount cannot be aborted",
            "as root: mount -t fusectl none /sys/fs/fuse/connections",
        )


def check_memory(root: Path = Path("/")) -> Finding:
    """The cgroup's limit counts daemon memory and primed page cache together."""
    limit = cgroup_limit(root)
    if limit is None:
        return ok("memory", "no cgroup limit")
    text = f"cgroup limit {limit / (1 << 30):.1f} GiB"
    if limit < _MEMORY_LOW:
        return note("memory", text, "primed pages count against it too: raise the limit, or use --no-prime")
    return ok("memory", text)


def check_python() -> Iterator[Finding]:
    """Stepfs itself, the interpreter, and the packages that stepfs declares, if it is installed as a package."""
    yield ok("stepfs", __version__)
    yield ok("python", f"{platform.python_version()} at {sys.executable}")
    with suppress(importlib.metadata.PackageNotFoundError):
        missing = _missing_packages(importlib.metadata.requires("stepfs") or [])
        if required := missing.pop("", []):
            remedy = "pip install stepfs, in the environment that runs it"
            yield fail("packages", f"not installed: {', '.join(required)}", remedy)
        else:
            yield ok("packages", "all that stepfs needs are installed")
        for extra, names in sorted(missing.items()):
            remedy = f"only what says so needs it: pip install 'stepfs[{extra}]'"
            yield note(f"extra {extra}", f"not installed: {', '.join(names)}", remedy)


def _missing_packages(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Packages that are not installed by the extra that brings them, "" for those that stepfs needs."""
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for requirement in sorted(requirements, key=str.lower):
        name, extra = _NAME.match(requirement), _EXTRA.search(requirement)
        if name is not None and name[0] != "stepfs":  # an extra that includes another one
            try:
                importlib.metadata.version(name[0])
            except importlib.metadata.PackageNotFoundError:
                missing[extra[1] if extra else ""].append(name[0])
    return missing


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


def check_mounts(target: str | None = None) -> Iterator[Finding]:
    """Check every stepfs mount in this namespace. Only those on directory or of lake `target`, if given, can fail."""
    found = [mounted for mounted in mounts() if mounted.fstype == FSTYPE]
    if not found:
        yield ok("mounts", "no stepfs mount here")
    stacked = {directory for directory, count in Counter(m.directory for m in found).items() if count > 1}
    for directory, mounted in sorted({mounted.directory: mounted for mounted in found}.items()):
        findings = [check_alive(mounted)]
        if directory in stacked:
            findings.append(
                fail(
                    f"mount {directory}",
                    "several mounts are stacked on it",
                    f"`{command('stepfs', 'unmount', directory)}`, until none is left",
                )
            )
        asked = (
            target is None
            or source_of(target).rstrip("/") == mounted.source.rstrip("/")
            or str(real_directory(Path(target))) == directory
        )
        for finding in findings:
            told_only = not asked and finding.level is Level.FAIL
            yield replace(finding, level=Level.NOTE) if told_only else finding


def check_alive(mounted: Mounted) -> Finding:
    """List a control directory; the kernel would answer `stat` from its memory even if the daemon is dead."""
    directory = mounted.directory
    subject = f"mount {directory}"
    health, error = check_health(mounted, below=".stepfs")
    why = "it does not answer" if error is None else error.strerror
    match health:
        case Health.ALIVE:
            return _at_work(subject, Path(directory))
        case Health.DEAD:
            again = command("stepfs", "mount", "LAKE", directory)
            remedy = f"`{again}` or `{command('stepfs', 'unmount', directory)}` clears it"
            return fail(subject, f"stale, its daemon is gone: {why}", remedy)
        case Health.SILENT if trouble := trouble_of(mounted):
            remedy = f"wait, or end it with `{command('stepfs', 'unmount', directory)}`; its log is {log_file(Path(directory))}"
            return fail(subject, trouble, remedy, exit_code=6)
        case Health.SILENT:
            return fail(
                subject,
                f"does not answer within {ANSWER_S:.0f} s",
                f"look at its log, {log_file(Path(directory))}, and its process; {give_up_command(directory)} gives it up",
            )
        case Health.UNKNOWN:
            return note(subject, f"cannot be looked into: {why}", "ask the user who mounted it, or root")


def _at_work(subject: str, directory: Path) -> Finding:
    """What a mount that answers says of its lake."""
    try:
        status = read_status(directory)
        store = status["store"]
        config: Any = read_config(directory)
    except (StepfsError, KeyError) as error:
        return note(subject, f"alive, but its status cannot be read: {error}", "look at its log")
    if isinstance(store, dict) and (trouble := store.get("trouble")):
        return fail(subject, f"alive, but cannot follow its lake: {trouble}", "see the message")
    if watched := config["checkpoint_dir"]:
        why = answer_within(partial(_why_nothing_is_recorded, watched))
        if isinstance(why, str) and why:
            return note(subject, "alive, but no checkpoint can be recorded", why)
    if (waits := waits_finding(status)) is not None:
        return note(subject, *waits)
    return ok(subject, "alive")


def _why_nothing_is_recorded(watched: str) -> str:
    place = Place.parse(watched)
    try:
        return look(place).unknown_layout(place)
    except AbsentError as error:
        return str(error)


def check_directory(directory: Path) -> Finding:
    """Check whether the directory is a mount of ours, or can become one."""
    subject = f"directory {directory}"
    real = real_directory(directory)
    mounted = mount_at(real)
    if mounted is not None and mounted.fstype == FSTYPE:
        return ok(subject, f"is a mount of {mounted.source}")
    if mounted is not None:
        return fail(subject, f"is a mount of type {mounted.fstype}", "choose a directory of its own", exit_code=4)
    closed = is_closed(real)
    names = [] if closed else list_within(real)
    if isinstance(names, FileNotFoundError | NotADirectoryError):
        remedy = command("mkdir", "-p", directory)
        return fail(subject, "does not exist or is no directory", remedy, exit_code=3)
    if names is None or isinstance(names, OSError):
        why = "it does not answer" if names is None else names.strerror
        return fail(subject, f"cannot be listed: {why}", "choose a directory you own")
    if names:
        return fail(subject, f"is not empty ({names[0]} …)", "mount on an empty directory", exit_code=4)
    given_back = (
        f"mode 0000, since a signal ended its mount: `{command('stepfs', 'unmount', directory)}` or a mount ends that"
    )
    return ok(subject, given_back if closed else "is empty and can be mounted on")
