"""What goes on beside a test of `Lake`: threads that use it, and the background thread of each."""

from __future__ import annotations

import threading
import time

from stepfs import Lake

WAIT_S = 20.0


def background_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("stepfs-reader")]


def until(condition) -> None:
    """Poll a fact of another thread, which cannot tell of it."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def in_thread(function) -> tuple[threading.Thread, list]:
    """Runs beside the test; its result, or its exception, in the list."""
    found: list = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def is_waiting(lake: Lake) -> bool:
    return lake._parts().waits.waiting > 0
