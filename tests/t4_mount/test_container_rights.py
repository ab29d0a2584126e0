"""A container without /dev/fuse or with a read-only root: one line that says what to add, or a daemon that works.
(Without the capability: test_unit_sandbox.py.)
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from finished import ran
from realmount import STEPFS, lake_with, make_lake, payload

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


SCRIPT = """
set -e
mount --make-rprivate /
mount --bind / /
mount -o remount,ro,bind /
cd /
! touch /tmp/probe 2>/dev/null
unset TMPDIR XDG_CACHE_HOME XDG_STATE_HOME XDG_RUNTIME_DIR
"$@" --foreground &
for i in $(seq 300); do [ -e "$DIR/.stepfs/status.json" ] && break; sleep 0.1; done
cat "$DIR/step-000000001/rank-00001.bin"
kill -INT $!
wait $! || [ $? = 130 ]
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="root makes namespaces")
def test_no_writable_file_system_is_needed(tmp_path):
    url, directory = (tmp_path / "lake").as_uri(), tmp_path / "m"
    lake_with(url, 2)
    directory.mkdir()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", *STEPFS, "mount", url, str(directory)],
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "DIR": str(directory)},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == payload(1, 1)
