"""A guardian that is killed takes priming along, and nothing else: nobody could free the readers of a primed mount."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from realmount import make_lake, mounted, payload, produce, until

from stepfs_producer import Producer


def test_a_mount_whose_guardian_is_killed_serves_on_without_priming(file_url, tmp_path):
    make_lake(file_url)
    produce(file_url, 3)
    with mounted(file_url, tmp_path / "m", "--ranks", "0-1", allowed=["its guardian was killed"]) as mount:
        (guardian,) = Path(f"/proc/{mount.pid}/task/{mount.pid}/children").read_text().split()
        os.kill(int(guardian), signal.SIGTERM)  # meant for daemons: a guardian ends with its own
        until(lambda: mount.status()["data"]["primed_files"] == 6, "not primed")
        os.kill(int(guardian), signal.SIGKILL)
        until(lambda: "its guardian was killed" in mount.log.read_text(), "nobody noticed")
        fetched = mount.status()["data"]["bytes_fetched"]
        with Producer(file_url, producer_id="p1") as producer:
            producer.append([payload(3, rank) for rank in range(2)], position=0)
        until(lambda: mount.status()["data"]["bytes_fetched"] > fetched, "step 3 is not fetched")
        assert mount.file(3, 1).read_bytes() == payload(3, 1)
        assert mount.status()["data"]["primed_files"] == 6
