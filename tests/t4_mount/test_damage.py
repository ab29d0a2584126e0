"""Damage in the store: EIO for that file alone, the object named in the log, the mount goes on."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from realmount import lake_with, mounted, payload

DAMAGE = {
    "a flipped bit": lambda path, at: _patch(path, at),  # noqa: PLW0108 (defined below)
    "a truncated object": lambda path, _: os.truncate(path, 100),
    "an object that is gone": lambda path, _: path.unlink(),
}


def _patch(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_slice_is_eio_for_that_file_alone(file_url, tmp_path, damage):
    lake_with(file_url, 4)
    allowed = ["step 2"]
    with mounted(file_url, tmp_path / "m", "--no-prime", "--prefetch", "0", allowed=allowed) as mount:
        facts = json.loads((mount.directory / ".stepfs/steps/2.json").read_text())
        path = Path(urlsplit(file_url).path) / facts["object"]
        path.chmod(0o644)
        DAMAGE[damage](path, facts["slices"][1]["offset"] + 7)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output error") as caught:
                mount.file(2, 1).read_bytes()
            assert caught.value.errno == errno.EIO
        assert facts["object"] in mount.log.read_text()
        if damage == "a flipped bit":
            assert mount.file(2, 0).read_bytes() == payload(2, 0)
        for step in (0, 1, 3):
            assert [mount.file(step, rank).read_bytes() for rank in (0, 1)] == [
                payload(step, 0),
                payload(step, 1),
            ]
        assert mount.status()["faults"] == 0


def test_a_steps_facts_agree_with_the_files(file_url, tmp_path):
    batches = lake_with(file_url, 3)
    with mounted(file_url, tmp_path / "m") as mount:
        every = [json.loads((mount.directory / f".stepfs/steps/{n}.json").read_text()) for n in range(3)]
        facts = every[1]
        assert (facts["step"], facts["producer"], facts["epoch"]) == (1, "p0", 1)
        assert [s["length"] for s in facts["slices"]] == [len(data) for data in batches[1]]
        (*_, last) = [one["step"] for one in every if one["version"] == facts["version"]]
        assert facts["position"] == last  # of its commit, which usually published steps 0 to 2
        raw = (Path(urlsplit(file_url).path) / facts["object"]).read_bytes()
        for entry, data in zip(facts["slices"], batches[1], strict=True):
            assert raw[entry["offset"] :][: entry["length"]] == data
        assert facts["time"] == pytest.approx(mount.step(1).stat().st_mtime)


def test_many_threads_read_many_files_at_once(lake_url, tmp_path):
    batches = lake_with(lake_url, 8, slices=4, size=300_000)
    with mounted(lake_url, tmp_path / "m") as mount:
        wrong = []

        def read(number: int) -> None:
            for turn in range(8):
                step, rank = (turn * 5 + number) % 8, number % 4
                if mount.file(step, rank).read_bytes() != batches[step][rank]:
                    wrong.append((step, rank))

        threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert wrong == []
        assert mount.status()["faults"] == 0
