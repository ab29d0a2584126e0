"""Keeps the log file of a background daemon below a bound while the daemon runs.

Beyond the bound the oldest lines are dropped and the newest quarter stays. The file is cut through its open
descriptor: no path is looked up, so no user can plant a link, and output that bypasses `logging` (faulthandler) stays
in the same file. Rejected: renaming to `.1`, which needs the path, and a second file that the next mount would have to
clean up.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from stepfs.mount.log_repeats import Repeats

BYTES_MAX: Final = 16 << 20
_KEPT_OF_MAX: Final = 4  # the newest quarter is kept
_CUT: Final = b"... (older lines were dropped here: the log had reached its bound)\n"


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records to `stream`; similar records at most once a minute.

    `bytes_max` bounds the file behind the stream. Only the daemon that serves may set it: a daemon that finds the
    directory taken writes its line into the log of another.
    """

    def __init__(self, stream: TextIO, *, repeats: Repeats | None = None) -> None:
        super().__init__(stream)
        self._repeats = repeats or Repeats()
        self.bytes_max: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        for admitted in self._repeats.admitted(record):
            self._write(admitted)

    def close(self) -> None:
        self.acquire()
        try:
            for record in self._repeats.rest():
                self._write(record)
        finally:
            self.release()
        super().close()

    def _write(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if self.bytes_max is not None:
            with suppress(OSError, ValueError):  # a log that cannot be cut is still a log
                cut(self.stream.fileno(), self.bytes_max)


def cut(descriptor: int, bytes_max: int) -> None:
    """Drop the oldest lines of a file that is longer than `bytes_max` and written by appending; no other is touched."""
    status = os.fstat(descriptor)
    if status.st_size <= bytes_max or not stat.S_ISREG(status.st_mode):
        return
    if not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
        return  # not in append mode: its writers would leave a hole
    kept = b""
    with suppress(OSError), Path(f"/proc/self/fd/{descriptor}").open("rb") as reader:
        reader.seek(status.st_size - bytes_max // _KEPT_OF_MAX)
        kept = reader.read(bytes_max // _KEPT_OF_MAX)
        kept = kept.partition(b"\n")[2] or kept
    os.ftruncate(descriptor, 0)
    os.write(descriptor, _CUT + kept)
