"""The command behind scripts/csi_sanity: holder and plugin of a node, a lake in files, and csi-sanity."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.machine import make_long_lake
from csi_sanity.controller import serve
from stepfs.mount.host.mount_points import unmount
from stepfs.mount.host.mount_table import mounts

_HOW = "go install github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@v5.5.0"
_UP_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/csi_sanity", description=__doc__)
    parser.add_argument("program", help="csi-sanity, of kubernetes-csi/csi-test")
    given = parser.parse_args()
    program = shutil.which(given.program)
    if program is None:
        sys.stderr.write(f"csi_sanity: {given.program} is no program; {_HOW}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="stepfs-csi-") as made, ExitStack() as ending:
        directory = Path(made)
        ending.callback(_unmounted, directory)
        lake = f"file://{directory}/lake"
        make_long_lake(lake, 513, 2)
        plugin, endpoint = directory / "plugin.sock", directory / "csi.sock"
        sockets = ["--endpoint", str(plugin), "--holder", str(directory / "holder.sock")]
        for role, listens in (("holder", directory / "holder.sock"), ("plugin", plugin)):
            command = [sys.executable, "-m", "stepfs.csi", role, *sockets, "--base", str(directory / "base")]
            running = ending.enter_context(subprocess.Popen(command))
            ending.callback(running.terminate)
            _until(listens, running)
        server = serve(str(endpoint), str(plugin), lake)
        ending.callback(lambda: server.stop(None).wait())
        words = [
            f"--csi.endpoint=unix://{endpoint}",
            f"--csi.mountdir={directory / 'mount'}",
            f"--csi.stagingdir={directory / 'stage'}",
            "--ginkgo.focus=Node Service|Identity Service",
            "--ginkgo.v",
        ]
        return subprocess.run([program, *words], check=False).returncode


def _until(socket: Path, running: subprocess.Popen[bytes]) -> None:
    for _ in range(int(_UP_S / 0.05)):
        if socket.exists():
            return
        if running.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"csi_sanity: nothing listens on {socket}")


def _unmounted(directory: Path) -> None:
    """Also after a failure: what csi-sanity left."""
    for mounted in reversed(mounts()):
        if mounted.directory.startswith(str(directory)):
            unmount(Path(mounted.directory), lazy=True)


if __name__ == "__main__":
    sys.exit(main())
