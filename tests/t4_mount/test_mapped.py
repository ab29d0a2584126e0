"""Files that are mapped and not read: they cost nothing, take no room from what is read, and are there when touched."""

from __future__ import annotations

import mmap
import os
from functools import partial

from realmount import mounted, stepfs, until
from test_counts_read import commit, read

MAPPED = 160
SIZE = 512 << 10
IN_ORDER = 8  # steps after which a reader that began in the middle of a lake is believed to go on in order


def map_file(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def are_primed(mount, files):
    return mount.status()["data"]["primed_files"] >= files


def test_files_mapped_beyond_the_budget_leave_room_for_steps_and_have_their_bytes_when_touched(
    file_url, tmp_path
):
    batches = commit(file_url, 1, [SIZE], steps=MAPPED + 20)
    with mounted(file_url, tmp_path / "m", "--group", "g", "--memory-size", "64M", "--poll", "30s") as mount:
        maps = [map_file(mount.file(step, 0)) for step in range(MAPPED)]
        assert mount.status()["data"]["bytes_fetched"] == 0
        for step in range(MAPPED, MAPPED + 20):
            if step == MAPPED + IN_ORDER + 1:  # what is opened before it is primed stays so
                until(partial(are_primed, mount, MAPPED + 20 - step), "the steps ahead are not primed")
            assert read(mount.file(step, 0)) == batches[step][0]
        assert mount.status()["data"]["bytes_fetched"] <= 20 * SIZE
        stepfs("checkpoint", file_url, "--group", "g", str(MAPPED))
        until(lambda: mount.steps()[0] == f"step-{MAPPED:09d}", "the checkpoint is not seen")
        held = 16
        for opened in maps[held:]:
            opened.close()
        for step, opened in enumerate(maps[:held]):
            assert opened[:] == batches[step][0]
            opened.close()
