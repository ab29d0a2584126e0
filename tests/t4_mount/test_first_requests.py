"""Readers that come the moment a mount stands, before it says that it is ready: supervised trainers poll for it."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from realmount import lake_with, mounted

from stepfs.format.ids import SEGMENT_STEPS
from stepfs.mount.host import mounts


def test_a_reader_at_the_first_moment_gets_its_step(file_url, tmp_path):
    """Its step is in an index segment that is not loaded. Loads had no home until the guardian ran: EIO."""
    lake_with(file_url, SEGMENT_STEPS + 2, size=20)
    directory = tmp_path / "m"
    over = threading.Event()

    def list_at_once() -> list[str]:
        while mounts.mount_at(directory) is None:
            assert not over.is_set(), "nothing was mounted"
            time.sleep(0)
        return sorted(os.listdir(directory / "step-000000000"))

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(list_at_once)
        try:
            with mounted(file_url, directory):
                assert reader.result(30) == ["rank-00000.bin", "rank-00001.bin"]
        finally:
            over.set()
