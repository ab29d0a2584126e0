"""The program of a daemon: `python -m stepfs.mount.daemon FD DIR`, where FD is its socket to the keeper.

A new session, the log in place of a terminal; it imports all that it will ever need, since the package may be another
version a minute later, says so, and is told what to do.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from stepfs.errors import RefusedError
from stepfs.mount.daemon.ending import report
from stepfs.mount.daemon.keeper_socket import Tie
from stepfs.mount.logs import FollowedLog, configure_log
from stepfs.mount.options import MountOptions

_log = logging.getLogger("stepfs.mount")

_LATER = (  # and seconds before
    ("stepfs.mount.metrics", 2.0),
    ("stepfs._internal.scrape", 0.0),
    ("stepfs.payload", 8.0),  # numpy takes 0.1 s of a processor: not beside the first reads
)


def main(arguments: list[str]) -> int:
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    tie = Tie(sock)

    def wait(line: str) -> None:
        _log.warning("%s", line)
        tie.say("waiting", waiting=line, silent=True)

    def tell(line: str) -> None:
        tie.say("waiting", waiting=line, silent=False)

    try:
        gc.disable()  # nothing of what is imported will be garbage; to look for some takes a tenth of the time
        from stepfs.mount.daemon.session import run  # noqa: PLC0415 (an import that fails is reported, too)

        gc.freeze()
        gc.enable()
        if not tie.begin():
            return 0
        with suppress(OSError):  # the keeper's own is lower
            Path("/proc/self/oom_score_adj").write_text(str(tie.start["oom"]))
        os.environ.pop("NOTIFY_SOCKET", None)
        options, strange = MountOptions.from_map(tie.spec["options"])
        configure_log(options)
        if strange:
            _log.warning("options of another version, which this one does not have: %s", ", ".join(strange))
        how = run(options, lambda: _get_ready(options, tie.spec.get("log")), wait, tell, tie)
    except BaseException as error:  # noqa: BLE001 (the edge: every failure is reported to the keeper)
        return report(tie, error)
    tie.say("ended", how=how, line="the mount was stopped before it was ready", code=0, announced=True)
    return 0


def _get_ready(options: MountOptions, log: str | None) -> None:
    """It serves: only then the log is its own, and there is time to import what most mounts do not need at once."""
    if log is not None:
        try:
            configure_log(options, FollowedLog(Path(log)))
        except (OSError, RefusedError) as error:  # what was open when it started takes the lines
            _log.warning("%s", error)
    threading.Thread(target=_import_the_rest, daemon=True).start()


def _import_the_rest() -> None:
    """Else, after an installation in place, it would come from another version."""
    for name, seconds in _LATER:
        time.sleep(seconds)
        with suppress(ImportError):
            import_module(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
