"""A mount in the background: a fresh process, reliable readiness for the caller, and its log.

parent: spawn `python -m stepfs.mount.daemon <fd> DIR mount|replace`, options through its stdin, wait on the pipe <fd>
        a guardian: `… <fd> DIR follow`, the socket <fd>, its order through stdin
child:  new session, log file instead of a terminal, serve; on the pipe: {"pid": …} once a listing answers,
or {"error": …, "exit_code": …}; before it, lines {"waiting": …, "silent": …} for the user's terminal
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from stepfs.errors import RefusedError, StepfsError, leaves
from stepfs.mount.host import mount_points
from stepfs.mount.host.mount_points import mount_at, real_directory
from stepfs.mount.options import MountOptions
from stepfs.mount.redact import redacted
from stepfs.own_directory import home

if TYPE_CHECKING:
    from stepfs.store.silence import Say

FIELDS: Final = ("operation", "errno", "step", "slice", "rank", "version", "group", "lake_id", "repeated")
WINDOW_S: Final = 60.0
KINDS_MAX: Final = 16_384  # kinds; beyond that the one that was met least lately is forgotten
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a lake's texts must not control a terminal
_REPLY_UNWANTED: Final = f"fuse_reply_* failed with {os.strerror(errno.ENOENT)}"


def configure_log(options: MountOptions, handler: logging.Handler | None = None) -> None:
    """Send all logs of this process to stderr, or to `handler`, in the format that the options choose.

    Facts come as `extra={"step": …}` of a log call; only those of `FIELDS` are used. JSON lines contain the mount point: a
    collector mixes the lines of several daemons. Text that looks like a credential is removed from the finished line.
    """
    formatter = Json(options.directory) if options.log_format == "json" else Text(_TEXT)
    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(_asked_for)
    handler.addFilter(Repeats())
    logging.basicConfig(handlers=[handler], force=True)
    debug = os.environ.get("STEPFS_DEBUG") == "1"
    logging.getLogger("stepfs").setLevel(logging.DEBUG if debug else logging.INFO)


def _asked_for(record: logging.LogRecord) -> bool:
    """False for pyfuse3's error about a reply to a request that the kernel has already ended.

    ENOENT from a reply means that the connection ended first, as when a file is closed after `umount -l`.
    """
    return record.name != "pyfuse3" or not record.getMessage().endswith(_REPLY_UNWANTED)


class Repeats(logging.Filter):
    """Admits one line a minute of each kind (`extra={"alike": key}`), and says how many it left out as `repeated`."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now_s = now_s
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}  # until when, and how many were left out

    def filter(self, record: logging.LogRecord) -> bool:
        key: Hashable = getattr(record, "alike", None)
        if key is None:
            return True
        with self._lock:
            until_s, count = self._kinds.pop(key, (float("-inf"), 0))
            now_s = self._now_s()
            admitted = now_s >= until_s
            self._kinds[key] = (now_s + WINDOW_S, 0) if admitted else (until_s, count + 1)
            if len(self._kinds) > KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
        if admitted and count:
            record.repeated = count
        return admitted


class Text(logging.Formatter):
    """One line with its facts; a traceback below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        facts = " ".join(f"{name}={_word(value)}" for name, value in facts_of(record).items())
        return super().formatMessage(record) + (f"  {facts}" if facts else "")

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub("?", redacted(super().format(record)))


class Json(logging.Formatter):
    """One object per line, for any message, of the daemon of `mount` or of a command."""

    def __init__(self, mount: Path | None = None) -> None:
        super().__init__()
        self._mount = {} if mount is None else {"mount": str(mount)}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        body: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._mount,
            "message": redacted(record.getMessage()),
            **{name: redacted(v) if isinstance(v, str) else v for name, v in facts_of(record).items()},
        }
        if record.exc_info:
            body["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(body, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


_log = logging.getLogger("stepfs.mount")

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOG_TAIL_LINES: Final = 5
_LOG_NAME_BYTES_MAX: Final = 200
_LOG_NAME: Final = re.compile(r".+-[0-9a-f]{8}\.log(\.1)?")
_LOG_KEPT_S: Final = 30 * 86_400.0
LOG_BYTES_MAX: Final = 8 << 20  # of the log, and of the older one beside it


class DaemonError(StepfsError):
    """The daemon could not mount; the error carries the daemon's message and exit code."""

    def __init__(self, message: str, exit_code: int, *, announced: bool) -> None:
        super().__init__(message)
        self.announced = announced
        self.exit_code = exit_code  # type: ignore[misc]  # of this failure, not of the class


def log_file(directory: Path) -> Path:
    """The log of the daemon of a mount point: it outlives the mount. In `STEPFS_LOG_DIR`, or the default directory.

    The default is /var/log/stepfs for root and the XDG state directory for other users.
    """
    chosen = os.environ.get("STEPFS_LOG_DIR")
    if chosen:
        base = Path(chosen)
    elif os.geteuid() == 0:
        base = Path("/var/log/stepfs")
    else:
        state = os.environ.get("XDG_STATE_HOME") or str(home() / ".local/state")
        base = Path(state) / "stepfs"
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
    name = os.fsdecode(os.fsencode(directory.name)[:_LOG_NAME_BYTES_MAX])
    return base / f"{name or 'root'}-{digest}.log"


def start(options: MountOptions, say: Say = lambda _: None, *, replace: bool = False) -> int:
    """Mount in the background, or `replace` the daemon of the mount that is there.

    Returns the new daemon's pid once its mount answers a listing, else `DaemonError`.
    `say` is called with a line when the daemon waits for a silent store; it gives up in bounded time.
    """
    directory = real_directory(options.directory)
    descriptor = mount_points.descriptor_of(directory)
    handed_over = () if descriptor is None else (descriptor,)
    for number in handed_over:
        mount_points.check_passed(number)
    log = log_file(directory)
    free = mount_at(directory) is None  # else the log is in use and this mount will be refused
    fresh = not log.exists()
    output = _open_log(log, start_over=free)
    _remove_old_logs(log)
    how = "replace" if replace else "mount"
    read_end, write_end = os.pipe()
    try:
        with os.fdopen(output, "ab") as output_file:
            process = subprocess.Popen(  # noqa: S603 (this interpreter, our own module)
                [sys.executable, "-m", "stepfs.mount.daemon", str(write_end), str(directory), how],
                stdin=subprocess.PIPE,
                stdout=output_file,
                stderr=output_file,
                cwd="/",
                start_new_session=True,
                pass_fds=(write_end, *handed_over),
            )
    finally:
        os.close(write_end)
    assert process.stdin is not None
    try:
        with process.stdin as pipe:
            pipe.write(options.to_json().encode())
    except BrokenPipeError:
        pass  # it died early; its log has the reason
    with os.fdopen(read_end, "rb") as pipe:
        answer = _answer(pipe, say)
    try:
        return _understand(answer, process, log)
    except DaemonError as error:
        if fresh and error.announced and mount_at(directory) is None:
            log.unlink(missing_ok=True)  # it would only repeat the caller's error
        raise


def _open_log(log: Path, *, start_over: bool) -> int:
    """A descriptor of the log, in append mode; a log that is too long is truncated if `start_over`.

    `RefusedError` if the path is not writable, or is not a file of this user: in a directory that all users may write
    to, a link planted under the log's name would make root write into another file.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if start_over and log.exists() and log.lstat().st_size > LOG_BYTES_MAX:
            log.unlink()
        descriptor = os.open(log, _APPEND, 0o644)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        why = "it is not a file of this user"
    raise RefusedError(f"cannot write the log {log}: {why}; set STEPFS_LOG_DIR to a directory of your own")


def _remove_old_logs(log: Path) -> None:
    """Remove the logs beside `log` that were not written for 30 days and whose mount points are not in use.

    Not in a directory that STEPFS_LOG_DIR names: others may keep files there, and `app-20261031.log` has such a name.
    """
    if os.environ.get("STEPFS_LOG_DIR"):
        return
    used = {log_file(Path(mounted.directory)).name for mounted in mount_points.mounts()} | {log.name}
    for path in log.parent.iterdir():
        if _LOG_NAME.fullmatch(path.name) and path.name.removesuffix(".1") not in used:
            with suppress(OSError):  # of another user, or gone meanwhile
                status = path.lstat()
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LOG_KEPT_S:
                    path.unlink()


class BoundedLog(RotatingFileHandler):
    """The log of a daemon that serves: at the bound it becomes `.1`, which may replace one of that name.

    It follows its name: once `logrotate` or a person has moved the file away, the next line begins a new one. Output
    that bypasses `logging` (faulthandler) goes along. Only for the daemon that serves: one that finds the directory
    taken writes its line into the log of another.
    """

    def __init__(self, log: Path, bytes_max: int) -> None:
        super().__init__(log, maxBytes=bytes_max, backupCount=1)

    def _open(self) -> TextIOWrapper:
        descriptor = _open_log(Path(self.baseFilename), start_over=False)
        for output in (sys.stdout, sys.stderr):
            os.dup2(descriptor, output.fileno())
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_at_its_name():
            with suppress(OSError, RefusedError):  # nothing writable has that name: the moved file takes the line
                if (moved := self.setStream(self._open())) is not None:
                    moved.close()
        super().emit(record)

    def _is_at_its_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.baseFilename), os.fstat(sys.stderr.fileno()))  # noqa: PTH116 (text)
        except OSError:
            return False

    def rotate(self, source: str, dest: str) -> None:
        with suppress(OSError):  # a log that cannot be renamed, as a file mounted by itself, is still a log
            super().rotate(source, dest)


def _answer(pipe: BinaryIO, say: Say) -> bytes:
    """The daemon's last line, empty if it died before; meanwhile passes the lines about its waiting to `say`."""
    for line in pipe:
        body = json.loads(line)
        if "waiting" not in body:
            return line
        say(body["waiting"])
    return b""


def _understand(answer: bytes, process: subprocess.Popen[bytes], log: Path) -> int:
    if not answer:
        code = process.wait()
        tail = "; ".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])
        raise DaemonError(
            f"the mount daemon ended (status {code}) before it was ready; {log} says: {tail}", 1, announced=False
        )
    body = json.loads(answer)
    if "error" in body:
        process.wait()
        raise DaemonError(body["error"], body["exit_code"], announced=body["announced"])
    process.returncode = 0  # it lives on by itself: suppresses Popen's ResourceWarning
    return int(body["pid"])


def main(arguments: list[str]) -> int:
    pipe, how, given = os.dup(int(arguments[0])), arguments[2], sys.stdin.read()
    if how != "follow":
        os.close(int(arguments[0]))
    options = MountOptions.from_json(json.loads(given)["options"] if how == "follow" else given)
    configure_log(options)
    answered = False

    def say(body: dict[str, object]) -> None:
        nonlocal answered
        if not answered:
            answered = True
            os.write(pipe, json.dumps(body).encode())
            os.close(pipe)

    def wait(line: str) -> None:
        _log.warning("%s", line)
        tell(line, silent=True)

    def tell(line: str, *, silent: bool = False) -> None:
        """`silent`: the store is."""
        if not answered:
            with suppress(BrokenPipeError):  # the starting process no longer waits
                os.write(pipe, json.dumps({"waiting": line, "silent": silent}).encode() + b"\n")

    try:
        from stepfs.mount.handover import Predecessor  # noqa: PLC0415 (an import that fails is reported, too)
        from stepfs.mount.session import run  # noqa: PLC0415

        before = Predecessor.at(options) if how == "replace" else None
        if how == "follow":
            before = Predecessor.of_dead(int(arguments[0]))

        def ready() -> None:
            configure_log(options, BoundedLog(log_file(Path(arguments[1])), LOG_BYTES_MAX))
            say({"pid": os.getpid()})

        run(options, ready, wait, tell, before)
    except BaseException as error:  # noqa: BLE001 (the edge: every failure is reported to the parent)
        code, line, expected = explain(error)
        _log.error("%s", line, exc_info=None if expected else error)
        say({"error": line, "exit_code": code, "announced": expected})
        return code
    # Ended by a signal while the lake was being opened.
    say({"error": "the mount was stopped before it was ready", "exit_code": 1, "announced": True})
    return 0


def explain(error: BaseException) -> tuple[int, str, bool]:
    """(exit code, one line, whether it is an expected error) of the exception that ended a session."""
    known = [leaf for leaf in leaves(error) if isinstance(leaf, StepfsError)]
    if known:
        return known[0].exit_code, str(known[0]), True
    leaf = leaves(error)[0]
    return 1, f"unexpected {type(leaf).__name__}: {leaf}", False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
