"""A container without /dev/fuse: one line that says what to add. (Without the capability: test_unit_sandbox.py.)"""

from __future__ import annotations

import os

import pytest
from programs import ran
from realmount import STEPFS, make_lake

HIDE = """
mount -t tmpfs none /dev
for name in null random urandom; do touch "/dev/$name"; done
mknod -m 666 /dev/null2 c 1 3 && mv /dev/null2 /dev/null
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes namespaces")
@pytest.mark.parametrize("command", ["mount", "doctor"])
def test_without_the_device_the_line_names_it(file_url, tmp_path, command):
    make_lake(file_url)
    (tmp_path / "mount").mkdir()
    words = [command, file_url, *([str(tmp_path / "mount")] if command == "mount" else [])]
    done = ran(
        ["unshare", "--mount", "--propagation=private", "sh", "-euc", HIDE, "sh", *STEPFS, *words],
        env={**os.environ, "STEPFS_LOG_DIR": str(tmp_path / "logs")},
    )
    assert "--device /dev/fuse" in done.stdout + done.stderr
    assert done.returncode == (4 if command == "mount" else 1)
    assert len(done.stderr.splitlines()) == 1
