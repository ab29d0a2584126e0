"""A mount that does not answer: what may be taken away by force, what may not, and that no command hangs on it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rawmount import mount_with_descriptor
from realmount import PATIENCE_S, change_constants, clear, stepfs, until

from stepfs.mount.host import mount_table
from stepfs.mount.host.abort import abort_mount

ANSWER_S = 1.0  # with a directory that does not answer; every other one does so in much less


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    change_constants(monkeypatch, {"stepfs._internal.control_files:ANSWER_S": ANSWER_S})


@pytest.fixture
def hung(tmp_path):
    """A mount whose server holds /dev/fuse and answers nothing."""
    directory = tmp_path / "it hangs"
    descriptor = mount_with_descriptor(directory)
    yield directory
    at = mount_table.mount_at(directory)
    if at is not None:
        abort_mount(str(directory), at.mount_id)
        clear(directory, None)
    os.close(descriptor)


def hanging_reader(directory):
    """A process whose request the kernel has put into the connection's queue."""
    reader = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; os.listdir(sys.argv[1])", str(directory)],
        stderr=subprocess.PIPE,
        text=True,
    )
    wchan = Path(f"/proc/{reader.pid}/wchan")
    until(lambda: any(word in wchan.read_text() for word in ("fuse", "request_wait")), wchan.read_text())
    return reader


@pytest.mark.parametrize("command", ["mount", "unmount"])
def test_a_hung_mount_is_left_alone_and_the_advice_frees_its_readers(lake, hung, command):
    arguments = ["mount", lake, hung] if command == "mount" else ["unmount", hung]
    done = stepfs(*arguments)
    assert done.returncode == 4
    assert "does not answer" in done.stderr
    advice = done.stderr.split("`")[1]
    assert advice.startswith("umount -f ")
    reader = hanging_reader(hung)
    assert subprocess.run(["sh", "-c", advice], timeout=PATIENCE_S, check=False).returncode in {0, 32}
    _, said = reader.communicate(timeout=PATIENCE_S)
    assert "OSError" in said
    assert mount_table.mount_at(hung) is None


def test_aborting_leaves_the_dead_mount_in_place_and_no_other_mount_is_touched(hung):
    """An empty directory would look like an empty lake."""
    reader = hanging_reader(hung)
    at = mount_table.mount_at(hung)
    assert not abort_mount(str(hung), at.mount_id + 1)
    assert reader.poll() is None
    asked = threading.Thread(target=abort_mount, args=(str(hung), at.mount_id), daemon=True)
    asked.start()
    asked.join(PATIENCE_S)
    assert not asked.is_alive()
    assert "OSError" in reader.communicate(timeout=PATIENCE_S)[1]
    assert mount_table.mount_at(hung) == at
    with pytest.raises(OSError, match=r"not connected|abort"):  # a thread may still be closing the device
        os.listdir(hung)
