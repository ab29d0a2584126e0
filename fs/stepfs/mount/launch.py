"""Starting mounts, and speaking with their keepers: `stepfs mount` in the background, in the foreground, with `--replace`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import stepfs
from stepfs._internal.control_files import read_config
from stepfs.errors import RefusedError, StepfsError, StoreUnreachableError, command
from stepfs.mount.host import mount_points
from stepfs.mount.host.mount_points import is_dead
from stepfs.mount.host.mount_table import FSTYPE, Mounted, descriptor_of, mount_at, real_directory
from stepfs.mount.keeper import address
from stepfs.mount.keeper.messages import HELD, SPEAKS, GarbageError, document, pair, read_document, receive, send
from stepfs.mount.logs import LOG_BYTES_MAX, log_file, open_log, remove_old_logs
from stepfs.mount.options import DEADLINE_S, MountOptions, merged

if TYPE_CHECKING:
    from stepfs.store.silence import Say

Check = Callable[[MountOptions], None]

# When the keeper gives up, and cuts the connection.
DEATHS: Final = 3  # within this time: what kills them may be a request, which the next one gets, too
WITHIN_S: Final = 60.0
PATIENCE_S: Final = 30.0  # for a daemon that serves; where the store is away, as long as a read waits for it
ANSWER_S: Final = 20.0  # for each answer of a daemon while another one takes over
SERVES_S: Final = 10.0  # for the first answer of the next one, while nobody reads
_KEEPER_S: Final = 5.0  # for a keeper to answer
_RESTART_S: Final = 5.0  # for a daemon to start another keeper
_RESTART_POLL_S: Final = 0.1
_LOG_TAIL_LINES: Final = 5
# Isolated from the user's environment, and without site-packages: 25 ms and 12 MB.
_PROGRAM: Final = "import sys; sys.path.append(sys.argv.pop(1)); from stepfs.mount.keeper.process import main; sys.exit(main(sys.argv[1:]))"


class DaemonError(StepfsError):
    """The daemon could not mount; the error carries the daemon's message and exit code."""

    def __init__(self, message: str, exit_code: int, *, announced: bool) -> None:
        super().__init__(message)
        self.announced = announced
        self.exit_code = exit_code  # type: ignore[misc]  # of this failure, not of the class


def keeper_command() -> list[str]:
    """Of this version, but for its arguments."""
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(stepfs.__file__).parent.parent)]


def spec_of(options: MountOptions, *, log: Path | None) -> int:
    """What a keeper needs to start a daemon, as a descriptor: credentials are in it. `log`: None in the foreground."""
    return document(
        {
            "version": stepfs.__version__,
            "keeper": keeper_command(),
            "command": [sys.executable, "-m", "stepfs.mount.daemon"],
            "environment": dict(os.environ),
            "directory": str(options.directory),
            "options": options.to_map(),
            "recover": options.recover,
            "spare": options.spare,
            "foreground": log is None,
            "json": options.log_format == "json",
            "log": None if log is None else str(log),
            "limits": {
                "deaths": DEATHS, "within_s": WITHIN_S, "patience_s": PATIENCE_S, "unreachable_s": DEADLINE_S,
                "answer_s": ANSWER_S, "serves_s": SERVES_S, "unreachable": StoreUnreachableError.exit_code,
                "log_bytes": LOG_BYTES_MAX,
            },
        }
    )  # fmt: skip


def start(
    options: MountOptions,
    say: Say = lambda _: None,
    *,
    replace: bool = False,
    given: Collection[str] = (),
    check: Check = lambda _: None,
) -> list[str]:
    """Mount in the background, or `replace` the daemon of the mount that is there; return once the mount answers a listing.

    `say` is called with a line when the daemon waits for a silent store; it gives up in bounded time. `given`: the options
    that were named; in a replacement the others stay as they were. `check` refuses what does not go together. Returns
    lines on what a replacement changes. `DaemonError` if the daemon could not serve.
    """
    directory = real_directory(options.directory)
    passed = descriptor_of(directory)
    if passed is not None:
        mount_points.check_passed(passed)
    log = log_file(directory)
    found = _keeper_at(directory) if replace else None
    if found is not None:
        return _replace(options, found, log, given, say, check)
    check(options)
    _check_served(directory)
    free = mount_at(directory) is None  # else the log is in use and this mount will be refused
    fresh = not log.exists()
    output = open_log(log, start_over=free)
    remove_old_logs(log)
    ours, theirs = pair()
    spec = spec_of(options, log=log)
    roll = document({"directory": str(directory), "spec": spec, "asker": theirs.fileno()})
    numbers = [spec, roll, theirs.fileno(), *([] if passed is None else [passed])]
    with os.fdopen(output, "ab") as output_file:
        process = subprocess.Popen(  # noqa: S603 (this interpreter, our own module)
            [*keeper_command(), str(roll), str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=output_file,
            stderr=output_file,
            cwd="/",
            start_new_session=True,
            pass_fds=numbers,
        )
    theirs.close()
    for number in (spec, roll):
        os.close(number)
    with ours:
        answer = _answer(ours, say)
    try:
        _understand(answer, process, log)
    except DaemonError as error:
        if fresh and error.announced and mount_at(directory) is None:
            log.unlink(missing_ok=True)  # it would only repeat the caller's error
        raise
    return []


def serve_in_foreground(
    options: MountOptions, *, replace: bool, given: Collection[str], check: Check = lambda _: None
) -> NoReturn:
    """Become the keeper of the mount, under this process's number; never returns but by an error.

    A mount that a keeper of a supervisor has left, because it was killed, goes on with this one.
    """
    directory = real_directory(options.directory)
    passed = descriptor_of(directory)
    if passed is not None:
        mount_points.check_passed(passed)
        os.set_inheritable(passed, True)
    found = _keeper_at(directory, waits=replace) if passed is None else None
    if found is not None and (replace or (found["stands_in"] and found["foreground"])):
        roll = _taken(found, options, given, check, replaced=replace)
    else:
        check(options)
        _check_served(directory)
        roll = {"directory": str(directory), "spec": spec_of(options, log=None)}
    numbers = [number for name, number in roll.items() if name in HELD and number >= 0]
    whole = document(roll)
    for number in (*numbers, whole):
        os.set_inheritable(number, True)
    sys.stdout.flush()
    sys.stderr.flush()
    arguments = [*keeper_command(), str(whole), str(directory)]
    os.execv(arguments[0], arguments)  # noqa: S606


def _taken(
    found: dict[str, Any], options: MountOptions, given: Collection[str], check: Check, *, replaced: bool
) -> dict[str, Any]:
    """The roll of a keeper that gives its mount to this process, and ends."""
    sock: socket.socket = found["sock"]
    before, _ = MountOptions.from_map(found["spec"]["options"])
    after, _ = merged(before, options, given)
    check(after)
    with sock:
        _ask(sock, "take")
        said, held = receive(sock)
        if "roll" not in said:
            raise RefusedError(f"{options.directory}: {said.get('error', 'its keeper does not give it away')}")
        with suppress(OSError, GarbageError):
            receive(sock)  # its end
    roll: dict[str, Any] = said["roll"] | dict(zip(said["names"], held, strict=True))
    spec = spec_of(after, log=None)
    same = not replaced and after == before  # the daemon that serves was started so
    roll["spec" if same else "then"] = spec
    return {**roll, "stands_in": False}


def _connected(mounted: Mounted) -> socket.socket | None:
    """To its keeper: where this user's listen, or where the mount says, whose keeper has had other variables. OSError."""
    sock = address.connect(mounted.device, _KEEPER_S)
    if sock is None and mounted.asked_as is None:
        with suppress(StepfsError):
            said = read_config(Path(mounted.directory)).get("keeper_place")
            sock = address.connect(mounted.device, _KEEPER_S, Path(said)) if isinstance(said, str) else None
    return sock


def look_at(mounted: Mounted) -> dict[str, Any] | None:
    """What the keeper of a mount says of it: `pid` of the daemon that serves, or `recovery`; None if it listens nowhere.

    `sock`: the connection, for another question; close it.
    """
    try:
        sock = _connected(mounted)
        if sock is None:
            return None
        _ask(sock, "look")
        said, given = receive(sock)
    except GarbageError:
        return None
    if "keeper" not in said:
        for number in given:
            os.close(number)
        return None if "error" not in said else said | {"sock": sock}
    with os.fdopen(given[0], "rb"):
        spec = read_document(given[0])
    return said | {"spec": spec, "sock": sock}


def trouble_of(mounted: Mounted) -> str:
    """Why no daemon serves a mount whose keeper lives, and when the next one is tried; '' if one serves."""
    with suppress(OSError):
        found = look_at(mounted)
        if found is not None:
            found["sock"].close()
            if (recovery := found.get("recovery")) is not None:
                next_s = recovery["next_s"]
                when = "is being started" if next_s is None else f"is started in {next_s:g} s"
                return (
                    f"no daemon serves; its keeper (pid {found['keeper']}) has tried {recovery['attempts']} times"
                    f" ({recovery['why'] or 'none has ended yet'}); another {when}, and it gives up in {recovery['until_s']:g} s"
                )
    return ""


def explained(directory: Path, error: StepfsError) -> StepfsError:
    """An error of looking into a mount; that its keeper has no daemon that serves, if this is why."""
    mounted = mount_at(real_directory(directory))
    trouble = trouble_of(mounted) if mounted is not None and mounted.fstype == FSTYPE else ""
    return StoreUnreachableError(f"{directory}: {trouble}") if trouble else error


def end(mounted: Mounted) -> bool:
    """Unmount where the keeper lives and no daemon serves; False if one does, or if there is no keeper."""
    with suppress(OSError, GarbageError):
        sock = _connected(mounted)
        if sock is not None:
            with sock:
                _ask(sock, "end")
                said, _ = receive(sock)
                return bool(said.get("ended"))
    return False


def keeper_of(mounted: Mounted) -> int | None:
    """A pidfd of the keeper of a mount; None if there is none that can be asked."""
    with suppress(OSError):
        sock = _connected(mounted)
        if sock is not None:
            with sock:
                return address.process_of(sock)
    return None


def _ask(sock: socket.socket, what: str, descriptors: Collection[int] = (), **facts: object) -> None:
    """If the keeper has closed the connection, it has said why, or nothing."""
    send(sock, {"ask": what, "speaks": SPEAKS, "version": stepfs.__version__, **facts}, [*descriptors])


def _keeper_at(directory: Path, *, waits: bool = True) -> dict[str, Any] | None:
    """As `look_at`, of a mount point; None if nothing, or a dead mount, is there. `RefusedError`."""
    mounted = mount_at(directory)
    if mounted is None or mounted.fstype != FSTYPE:
        return None
    if mounted.user not in {None, os.geteuid()}:
        if not waits:
            return None
        raise RefusedError(f"{directory}: user {mounted.user} mounted it; replace its daemon as that user")
    try:
        found = _looked_at(mounted, _RESTART_S if waits else 0.0)
    except OSError as error:
        if not waits:
            return None
        if isinstance(error, TimeoutError | BlockingIOError):
            raise _cannot(directory, f"its keeper does not answer for {_KEEPER_S:g} s") from error
        raise RefusedError(
            f"{address.places()[0]}: {error.strerror or error}; it must be this user's own, with mode 0700"
        ) from error
    if found is None:
        if not waits or is_dead(mounted):
            return None
        raise _cannot(directory, "its keeper listens nowhere: it is gone, or of another version")
    if "error" in found:
        raise _cannot(directory, found["error"])
    return found


def _looked_at(mounted: Mounted, within_s: float) -> dict[str, Any] | None:
    """`look_at`, also of a keeper that was killed, and in whose place a daemon starts another one."""
    until = time.monotonic() + within_s
    while (found := look_at(mounted)) is None and time.monotonic() < until and not is_dead(mounted):
        time.sleep(_RESTART_POLL_S)
    return found


def _check_served(directory: Path) -> None:
    """`RefusedError` where a mount's keeper has no daemon that serves: a look into it would wait for one."""
    mounted = mount_at(directory)
    if mounted is not None and mounted.fstype == FSTYPE and (trouble := trouble_of(mounted)):
        unmount, better = (
            command("stepfs", "unmount", directory),
            command("stepfs", "mount", "…", directory, "--replace"),
        )
        raise RefusedError(
            f"{directory}: {mounted.source} is mounted here, and {trouble}; wait, `{better}`, or `{unmount}`"
        )


def _replace(
    options: MountOptions, found: dict[str, Any], log: Path, given: Collection[str], say: Say, check: Check
) -> list[str]:
    before, _ = MountOptions.from_map(found["spec"]["options"])
    after, changes = merged(before, options, given)
    check(after)
    kept = found["spec"].get("log")  # the keeper's, and not that of the variables of this moment
    spec = spec_of(after, log=None if kept is None else Path(kept))
    sock: socket.socket = found["sock"]
    with sock:
        sock.settimeout(None)
        _ask(sock, "replace", [spec], handovers=found["handovers"])
        os.close(spec)
        answer = _answer(sock, say)
    if not answer:
        lives = _lives(options.directory, found["keeper"])
        who = (
            f"the next daemon ended before it was ready{_end_of(log)}"
            if lives
            else "its keeper ended before it answered"
        )
        status = command("stepfs", "status", options.directory)
        raise RefusedError(f"{options.directory}: {who}; `{status}` says which daemon serves, then try again")
    _understand(answer, None, log)
    return changes


def _lives(directory: Path, keeper: int) -> bool:
    """Whether that keeper still answers: then it was the daemon that ended without a word."""
    found = _keeper_at(directory, waits=False)
    if found is None:
        return False
    found["sock"].close()
    return bool(found["keeper"] == keeper)


def _answer(sock: socket.socket, say: Say) -> dict[str, Any]:
    """The keeper's last word, empty if it died before; meanwhile passes the lines about the daemon's waiting to `say`."""
    while True:
        try:
            said, _ = receive(sock)
        except GarbageError:
            return {}
        if "waiting" not in said:
            return said
        say(said["waiting"])


def _understand(answer: dict[str, Any], process: subprocess.Popen[bytes] | None, log: Path) -> None:
    if "pid" in answer:
        if process is not None:
            process.returncode = 0  # it lives on by itself: suppresses Popen's ResourceWarning
        return
    code = None if process is None else process.wait()
    if "error" in answer:
        raise DaemonError(answer["error"], answer["exit_code"], announced=answer["announced"])
    how = "" if code is None else f" (status {code})"
    raise DaemonError(f"the mount daemon ended{how} before it was ready{_end_of(log)}", 1, announced=False)


def _end_of(log: Path) -> str:
    with suppress(OSError):  # nothing was written, or somebody has moved it
        tail = "; ".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        return f"; {log} says: {tail}"
    return ""


def _cannot(directory: Path, why: str) -> RefusedError:
    return RefusedError(
        f"{directory} cannot be taken over: {why}; `{command('stepfs', 'unmount', directory)}`, and mount again"
    )
