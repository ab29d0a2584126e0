"""The stepfs mounts of this machine: alive, dead, or stacked.

A problem of a mount that the command does not name is reported, but no failure: it may be another job's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stepfs.command_hint import command
from stepfs.control_files import ANSWER_S, read_status
from stepfs.doctor.finding import Finding, Level, fail, note, ok
from stepfs.errors import StepfsError
from stepfs.mount.daemon import log_file
from stepfs.mount.host.dead_mount import Health, check_health, give_up_command, list_within
from stepfs.mount.host.mountinfo import FSTYPE, Mounted, mount_at, mounts, real_directory, source_of


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
        yield from findings if asked else map(_told_only, findings)


def _told_only(finding: Finding) -> Finding:
    return replace(finding, level=Level.NOTE) if finding.level is Level.FAIL else finding


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
        store = read_status(directory)["store"]
    except (StepfsError, KeyError) as error:
        return note(subject, f"alive, but its status cannot be read: {error}", "look at its log")
    trouble = store.get("trouble") if isinstance(store, dict) else None
    return (
        fail(subject, f"alive, but cannot follow its lake: {trouble}", "see the message")
        if trouble
        else ok(subject, "alive")
    )


def check_directory(directory: Path) -> Finding:
    """Check whether the directory is a mount of ours, or can become one."""
    subject = f"directory {directory}"
    real = real_directory(directory)
    mounted = mount_at(real)
    if mounted is not None and mounted.fstype == FSTYPE:
        return ok(subject, f"is a mount of {mounted.source}")
    if mounted is not None:
        return fail(subject, f"is a mount of type {mounted.fstype}", "choose a directory of its own", exit_code=4)
    names = list_within(real)
    if isinstance(names, FileNotFoundError | NotADirectoryError):
        remedy = command("mkdir", "-p", directory)
        return fail(subject, "does not exist or is no directory", remedy, exit_code=3)
    if names is None or isinstance(names, OSError):
        why = "it does not answer" if names is None else names.strerror
        return fail(subject, f"cannot be listed: {why}", "choose a directory you own")
    if names:
        return fail(subject, f"is not empty ({names[0]} …)", "mount on an empty directory", exit_code=4)
    return ok(subject, "is empty and can be mounted on")
