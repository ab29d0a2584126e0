"""A daemon in a container whose root file system is read-only, /tmp included."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from realmount import STEPFS, make_lake, payload, produce

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
    make_lake(url)
    produce(url, 2)
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
