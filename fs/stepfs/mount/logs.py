"""The daemon's log: lines for people, or JSON for machines, with the same facts and never a secret.

    text  2025-11-21 09:12:44,120 WARNING stepfs.mount: step 7 slice 1 cannot be read: …  step=7 rank=1
    json  {"time": "2025-11-21T09:12:44.120Z", "level": "WARNING", "logger": …, "message": …, "step": 7, "rank": 1}

Facts come as `extra={"step": …}` of a log call; only the names below are used. Text that looks like a credential is
removed from the finished line, whatever its origin: a library's error may quote its arguments.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stepfs.errors import UsageError
from stepfs.mount.bounded_log import LogHandler
from stepfs.store.settings import SECRETS

FIELDS: Final = ("operation", "errno", "step", "slice", "rank", "version", "group", "lake_id", "repeated")
_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SECRET_BYTES_MIN: Final = 4  # a shorter secret would match ordinary words
_IN_URL: Final = re.compile(r"(?<=://)[^/@\s\"']+@")
_IN_QUERY: Final = re.compile(
    r"((?:X-Amz-(?:Signature|Credential|Security-Token))=)[^&\s\"']+", re.IGNORECASE
)
_IN_SETTING: Final = re.compile(
    r"((?:secret|token|password|credential)\w*[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&]+", re.IGNORECASE
)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a lake's texts must not control a terminal
_REPLY_UNWANTED: Final = f"fuse_reply_* failed with {os.strerror(errno.ENOENT)}"
_STRUCK: Final = "[redacted]"


def configure(mount: Path) -> LogHandler:
    """Send all logs of this process to stderr, in the format that STEPFS_LOG_FORMAT chooses. `UsageError`.

    JSON lines contain the mount point: a collector mixes the lines of several daemons.
    """
    formatter = Json(mount) if chosen() == "json" else Text(_TEXT)
    handler = LogHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(_asked_for)
    logging.basicConfig(handlers=[handler], force=True)
    debug = os.environ.get("STEPFS_DEBUG") == "1"
    logging.getLogger("stepfs").setLevel(logging.DEBUG if debug else logging.INFO)
    return handler


def _asked_for(record: logging.LogRecord) -> bool:
    """False for pyfuse3's error about a reply to a request that the kernel has already ended.

    ENOENT from a reply means that the connection ended first, as when a file is closed after `umount -l`.
    """
    return record.name != "pyfuse3" or not record.getMessage().endswith(_REPLY_UNWANTED)


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


def redacted(text: str) -> str:
    """`text` without this process's credentials, without user and password in URLs, without labelled secrets."""
    for name in SECRETS:
        secret = os.environ.get(name, "")
        if len(secret) >= _SECRET_BYTES_MIN:
            text = text.replace(secret, _STRUCK)
    text = _IN_URL.sub(f"{_STRUCK}@", text)
    text = _IN_QUERY.sub(rf"\g<1>{_STRUCK}", text)
    return _IN_SETTING.sub(rf"\g<1>{_STRUCK}", text)


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text and text else json.dumps(text)
