"""The daemon's log: lines for people, or JSON for machines, with the same facts and never a secret.

    text  2025-11-21 09:12:44,120 WARNING stepfs.mount: step 7 slice 1 cannot be read: …  step=7 rank=1
    json  {"time": "2025-11-21T09:12:44.120Z", "level": "WARNING", "logger": …, "message": …, "step": 7, "rank": 1}

Facts come as `extra={"step": …}` of a log call; only the names below are used. Text that looks like a credential is
removed from the finished line, of any origin: a library's error may quote its arguments.

A trainer that retries a damaged file makes thousands of failures a second, and the first line describes them all. A log
call opts in with `extra={"alike": key}`: of lines with one key there is one a minute, with the number of those left
out before it as the fact `repeated`. Changes of state ("the store answers again") never opt in: their order matters.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stepfs.errors import UsageError
from stepfs.mount.redact import redacted

FIELDS: Final = ("operation", "errno", "step", "slice", "rank", "version", "group", "lake_id", "repeated")
WINDOW_S: Final = 60.0
KINDS_MAX: Final = 16_384  # kinds; beyond that the one that was met least lately is forgotten
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a lake's texts must not control a terminal
_REPLY_UNWANTED: Final = f"fuse_reply_* failed with {os.strerror(errno.ENOENT)}"


def configure(mount: Path, handler: logging.Handler | None = None) -> None:
    """Send all logs of this process to stderr, or to `handler`, in the format that STEPFS_LOG_FORMAT chooses. `UsageError`.

    JSON lines contain the mount point: a collector mixes the lines of several daemons.
    """
    formatter = Json(mount) if chosen() == "json" else Text(_TEXT)
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
    """Admits one line a minute of each kind. A handler filters in many threads at once, so a lock."""

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


def chosen() -> str:
    """`text` or `json`."""
    name = os.environ.get("STEPFS_LOG_FORMAT") or "text"
    if name not in {"text", "json"}:
        raise UsageError(f"STEPFS_LOG_FORMAT={name}: write text or json")
    return name


class Text(logging.Formatter):
    """One line with its facts; a traceback below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        facts = " ".join(f"{name}={_word(value)}" for name, value in facts_of(record).items())
        return super().formatMessage(record) + (f"  {facts}" if facts else "")

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub("?", redacted(super().format(record)))


class Json(logging.Formatter):
    """One object per line, for any message."""

    def __init__(self, mount: Path) -> None:
        super().__init__()
        self._mount = str(mount)

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        body: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "mount": self._mount,
            "message": redacted(record.getMessage()),
            **{name: redacted(v) if isinstance(v, str) else v for name, v in facts_of(record).items()},
        }
        if record.exc_info:
            body["traceback"] = redacted(self.formatException(record.exc_info))
        return json.dumps(body, default=str)


def facts_of(record: logging.LogRecord) -> dict[str, object]:
    """The facts of a log call besides its message."""
    return {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
