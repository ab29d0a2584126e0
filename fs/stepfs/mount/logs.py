"""The log of a mount: lines with facts, as text or JSON, in a file that outlives the mount and that its keeper keeps short."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Final

from stepfs._internal.own_directory import home
from stepfs.errors import RefusedError
from stepfs.mount.host import mount_table
from stepfs.mount.options import MountOptions
from stepfs.mount.redact import redacted

_log = logging.getLogger("stepfs.mount")

_WORDS: Final = {"version": "log_version"}  # in objects, where a version could be the program's
FIELDS: Final = ("operation", "errno", "step", "slice", "rank", "version", "group", "lake_id", "repeated")
WINDOW_S: Final = 60.0
KINDS_MAX: Final = 16_384  # kinds; beyond that the one that was met least lately is forgotten
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a lake's texts must not control a terminal
_REPLY_UNWANTED: Final = f"fuse_reply_* failed with {os.strerror(errno.ENOENT)}"

_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOG_TAIL_LINES: Final = 5
_LOG_NAME_BYTES_MAX: Final = 200
_LOG_NAME: Final = re.compile(r".+-[0-9a-f]{8}\.log(\.1)?")
_LOG_KEPT_S: Final = 30 * 86_400.0
LOG_BYTES_MAX: Final = 8 << 20  # of the log, and of the older one beside it


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
            "timestamp": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            **self._mount,
            "message": redacted(record.getMessage()),
            **{
                _WORDS.get(name, name): redacted(v) if isinstance(v, str) else v for name, v in facts_of(record).items()
            },
        }
        if record.exc_info:
            body["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(body, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)


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


def open_log(log: Path, *, start_over: bool) -> int:
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


def remove_old_logs(log: Path) -> None:
    """Remove the logs beside `log` that were not written for 30 days and whose mount points are not in use.

    Not in a directory that STEPFS_LOG_DIR names: others may keep files there, and `app-20261031.log` has such a name.
    """
    if os.environ.get("STEPFS_LOG_DIR"):
        return
    used = {log_file(Path(mounted.directory)).name for mounted in mount_table.mounts()} | {log.name}
    for path in log.parent.iterdir():
        if _LOG_NAME.fullmatch(path.name) and path.name.removesuffix(".1") not in used:
            with suppress(OSError):  # of another user, or gone meanwhile
                status = path.lstat()
                if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _LOG_KEPT_S:
                    path.unlink()


class FollowedLog(logging.StreamHandler[TextIOWrapper]):
    """The log of a daemon that serves, under its name: once its keeper, `logrotate` or a person has moved the file away, the
    next line begins a new one. Output that bypasses `logging` (faulthandler) goes along.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        super().__init__(self._open())

    def _open(self) -> TextIOWrapper:
        descriptor = open_log(self._log, start_over=False)
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
            return os.path.samestat(self._log.stat(), os.fstat(sys.stderr.fileno()))
        except OSError:
            return False
