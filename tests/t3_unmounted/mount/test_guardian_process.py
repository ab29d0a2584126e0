"""What the guardian makes of a daemon that does not get ready, without a mount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepfs.mount.health.guardian_process import Keeper
from stepfs.mount.host.messages import pair, send

STARTS_NOBODY = """
import os, threading
from stepfs.mount.health.guardian_process import Keeper
from stepfs.mount.host.messages import document, pair, send
said, theirs = pair()
order = {
    "command": ["/nowhere/python"], "environment": {}, "directory": "d", "pid": os.getpid(),
    "limits": {"attempts": 5, "patience_s": 60.0, "unreachable": 6, "unreachable_s": 60.0},
}
send(said, {"thread": threading.get_native_id()}, [document(order), os.eventfd(0)])
keeper = Keeper()
keeper.take(theirs)
keeper._daemons.clear()
print(keeper.recover())
"""


@pytest.mark.parametrize("silent", [False, True])
def test_only_a_daemon_that_says_that_the_store_is_silent_gets_more_time(silent: bool) -> None:
    keeper = Keeper()
    keeper._at_most = 60.0
    ours, theirs = pair()
    with ours, theirs:
        send(theirs, {"waiting": "a line for the user", "silent": silent})
        send(theirs, {"pid": 1})
        assert keeper._heard(ours) == {"pid": 1}
    assert keeper._until == (60.0 if silent else 0.0)


def test_a_log_that_cannot_be_written_does_not_end_the_guardian() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-c", STARTS_NOBODY]
        assert subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=full).stdout == b"False\n"
