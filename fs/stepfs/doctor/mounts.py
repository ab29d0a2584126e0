"""The stepfs mounts of this machine: alive, dead, or stacked.

What is wrong with a mount that nobody asked about is told and fails nothing: another job's dead mount is in nobody's way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stepfs.doctor.finding import Finding, Level, fail, note, ok
from stepfs.mount.daemon import log_file
from stepfs.mount.mountinfo import FSTYPE, Mounted, mount_at, mounts, real_directory, source_of
from stepfs.mount.stale import ANSWER_S, list_within


def check_mounts(target: str | None = None) -> Iterator[Finding]:
    """Every stepfs mount in this namespace; failures only of those on the directory or of the lake `target`, or of all."""
    found = [mounted for mounted in mounts() if mounted.fstype == FSTYPE]
    if not found:
        yield ok("mounts", "no stepfs mount here")
    stacked = {directory for directory, count in Counter(m.directory for m in found).items() if count > 1}
    for directory, source in sorted({mounted.directory: mounted.source for mounted in found}.items()):
        findings = [check_alive(directory)]
        if directory in stacked:
            findings.append(
                fail(
                    f"mount {directory}",
                    "several mounts are stacked on it",
                    f"umount -l {directory}, until none is left",
                )
            )
        asked = (
            target is None
            or source_of(target).rstrip("/") == source.rstrip("/")
            or str(real_directory(Path(target))) == directory
        )
        yield from findings if asked else map(_told_only, findings)
    yield from (check_read_ahead(mounted) for mounted in found)


def _told_only(finding: Finding) -> Finding:
    return replace(finding, level=Level.NOTE) if finding.level is Level.FAIL else finding


def check_alive(directory: str) -> Finding:
    """Lists a control directory; `stat` would be answered from the kernel's memory even when the daemon is dead."""
    subject = f"mount {directory}"
    answer = list_within(Path(directory) / ".stepfs")
    if answer is None:
        return fail(
            subject,
            f"does not answer within {ANSWER_S:.0f} s",
            f"look at its log, {log_file(Path(directory))}; `stepfs unmount {directory}` or umount -l {directory} gives it up",
        )
    if isinstance(answer, OSError):
        return fail(
            subject,
            f"stale, its daemon is gone: {answer.strerror}",
            f"`stepfs mount LAKE {directory}` clears it, or umount -l {directory}",
        )
    return ok(subject, "alive")


def check_read_ahead(mounted: Mounted) -> Finding:
    """The value in force, as root may have set it."""
    subject = f"mount {mounted.directory}"
    try:
        value = Path(f"/sys/class/bdi/{mounted.device}/read_ahead_kb").read_text().strip()
    except OSError:
        return note(subject, "read_ahead_kb cannot be read", "mount /sys in this container to see it")
    return ok(subject, f"read_ahead_kb {value}")


def check_directory(directory: Path) -> Iterator[Finding]:
    """Whether this is a mount of ours, or could become one."""
    subject = f"directory {directory}"
    real = real_directory(directory)
    mounted = mount_at(real)
    if mounted is not None and mounted.fstype == FSTYPE:
        yield ok(subject, f"is a mount of {mounted.source}")
        return
    if mounted is not None:
        yield fail(
            subject, f"is a mount of type {mounted.fstype}", "choose a directory of its own", exit_code=4
        )
        return
    if not real.is_dir():
        yield fail(subject, "does not exist or is no directory", f"mkdir -p {directory}", exit_code=3)
        return
    try:
        occupied = next(real.iterdir(), None)
    except OSError as error:
        yield fail(subject, f"cannot be listed: {error.strerror}", "choose a directory you own")
        return
    if occupied is not None:
        yield fail(subject, f"is not empty ({occupied.name} …)", "mount on an empty directory", exit_code=4)
        return
    yield ok(subject, "is empty and can be mounted on")
