"""Real S3 servers on loopback for tests and torture runs: SeaweedFS, and rclone's, which lies about creates.

Each is a process group in a directory of its own; it dies with the process that started it, even a killed one.
`TEST_S3_SERVER=tls` has SeaweedFS speak TLS; `TEST_S3_SERVER=http://127.0.0.1:7480` is a server that runs already, with
the keys below, such as Ceph's gateway.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import botodata
import certificates
from certificates import Certificate

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ACCESS_KEY = "stepfs-test-key"
SECRET_KEY = "stepfs-test-secret"
BUCKET = "stepfs-tests"
CHOSEN = os.environ.get("TEST_S3_SERVER", "")
_READY_S = 60.0
_PR_SET_PDEATHSIG = 1
_reserved: list[int] = []


@dataclass
class S3Server:
    """A running server; `process` is for tests that stop or kill it."""

    endpoint_url: str
    directory: Path
    process: subprocess.Popen[bytes]
    plain_port: int = 0  # without TLS
    certificate: Certificate | None = None  # of a server with TLS

    def kill(self) -> None:
        """For good: an orderly end takes seconds, and makes sense only where the data is looked at again."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def home(self) -> str:
        return f"s3://{BUCKET}"

    def environment(self, endpoint_url: str | None = None) -> dict[str, str]:
        """The variables with which a client process reaches this server, or a proxy before it, and no others."""
        trusted = {"AWS_CA_BUNDLE": str(self.certificate.public)} if self.certificate else {}
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, **trusted,
            "AWS_ENDPOINT_URL_S3": endpoint_url or self.endpoint_url, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip


def free_ports(count: int) -> list[int]:
    """`count` ports P such that P and P + 10000 (SeaweedFS's gRPC twin) are free, below the ephemeral range.

    Until this process ends they are its own: no other process gets them here.
    """
    picks = random.SystemRandom()
    while True:
        first = picks.randrange(12_000, 22_700 - count)
        ports = list(range(first, first + count))
        if all(_is_free(port) and _is_free(port + 10_000) and _reserve(port) for port in ports):
            return ports


@contextmanager
def chosen(directory: Path, *, ports: Sequence[int] | None = None) -> Iterator[S3Server]:
    """SeaweedFS, or what TEST_S3_SERVER names; `process` is then one that can be killed for nothing."""
    if CHOSEN in {"", "tls"}:
        with seaweedfs(directory, ports=ports, tls=CHOSEN == "tls") as server:
            yield server
    else:
        with _running(["sleep", "infinity"], directory, CHOSEN, {}) as server:
            yield server


@contextmanager
def seaweedfs(
    directory: Path, *, ports: Sequence[int] | None = None, options: Sequence[str] = (), tls: bool = False
) -> Iterator[S3Server]:
    """SeaweedFS with its data in `directory` (which a second start on the same directory finds again)."""
    s3, master, volume, filer, admin, secure = ports or free_ports(6)
    certificate = None
    if tls:
        directory.mkdir(parents=True, exist_ok=True)
        certificate = certificates.self_signed(directory)
        files = f"-s3.cert.file={certificate.public}", f"-s3.key.file={certificate.private}"
        options = [*options, f"-s3.port.https={secure}", *files]
    command = [
        program("weed"),
        "-logtostderr",  # which goes to server.log; else files in /tmp as well, for ever
        "mini",
        f"-dir={directory}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-volume.preStopSeconds=0",  # no other server waits for it
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-volume.port={volume}",
        f"-filer.port={filer}",
        f"-admin.port={admin}",
        *options,
    ]
    limits = {"GOMEMLIMIT": "512MiB", "GOGC": "50"}
    with _running(command, directory, f"http://127.0.0.1:{s3}", limits) as server:
        if certificate is not None:
            server.endpoint_url, server.certificate = f"https://127.0.0.1:{secure}", certificate
        yield server


@contextmanager
def rclone_s3(directory: Path) -> Iterator[S3Server]:
    """`rclone serve s3`: ignores If-None-Match, so every racing create wins."""
    buckets = directory / "buckets"
    buckets.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = [
        program("rclone"), "serve", "s3", str(buckets), f"--addr=127.0.0.1:{port}",
        f"--auth-key={ACCESS_KEY},{SECRET_KEY}", f"--config={directory / 'rclone.conf'}",
        f"--cache-dir={directory / 'cache'}",
    ]  # fmt: skip
    with _running(command, directory, f"http://127.0.0.1:{port}", {}) as server:
        yield server


def program(name: str) -> str:
    """The executable a wheel brought, or one on the PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found, f"{name} is not installed; install the project with its dev extra"
    return found


@contextmanager
def _running(
    command: Sequence[str], directory: Path, endpoint_url: str, extra: Mapping[str, str]
) -> Iterator[S3Server]:
    with running(command, directory, partial(_is_ready, endpoint_url), extra) as process:
        yield S3Server(endpoint_url, directory, process, int(endpoint_url.rpartition(":")[2]))


@contextmanager
def running(
    command: Sequence[str],
    directory: Path,
    is_ready: Callable[[], str],
    extra: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, once `is_ready` returns ''; it writes to server.log in `directory`, where it runs."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, **extra}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no Python lock
        )
    deadline = time.monotonic() + _READY_S
    try:
        while why := is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command!r}: {why}\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield process
    finally:
        _stop(process)


def _is_ready(endpoint_url: str) -> str:
    """'' once the bucket exists and an object can be written: SeaweedFS answers before it has volumes."""
    botodata.share()
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    client = _client(endpoint_url)
    try:
        if all(bucket["Name"] != BUCKET for bucket in client.list_buckets()["Buckets"]):
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
    except (BotoCoreError, ClientError) as error:
        return str(error)
    client.close()
    return ""


@cache
def _client(endpoint_url: str) -> S3Client:
    import boto3  # noqa: PLC0415 - half a second that tests without a server should not pay
    from botocore.config import Config  # noqa: PLC0415

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(
            retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10, s3={"addressing_style": "path"}
        ),
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign, wait_s in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port_of_nobody() -> int:
    """A port on which nothing listens, and nothing that a parallel test starts will."""
    return free_ports(1)[0]


def _reserve(port: int) -> bool:
    """Between looking and listening lie seconds, in which another process could be given the same port."""
    directory = Path(tempfile.gettempdir()) / f"stepfs-test-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(directory / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    _reserved.append(descriptor)  # held open: the kernel lets go of the lock when the process ends
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
