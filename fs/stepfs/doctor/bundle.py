"""`stepfs doctor --bundle`: one file with the facts that another person needs for a diagnosis, without credentials.

report.txt  versions.json  environment.json  system/…  mounts/<directory>/{status.json,config.json,metrics,accesslog,log}
logs/<name>.log: of mounts that do not exist (any more), such as one that failed to start
"""

import importlib.metadata
import io
import json
import os
import platform
import re
import stat
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepfs._internal.control_files import ANSWER_S, answer_within
from stepfs.errors import RefusedError
from stepfs.mount.host.mount_table import FSTYPE, mounts
from stepfs.mount.logs import log_file
from stepfs.mount.redact import redacted
from stepfs.store import settings

_TEXT_BYTES_MAX: Final = 1 << 20  # of each file the newest bytes
_LOGS_MAX: Final = 20
_FILES: Final = ("status.json", "config.json", "metrics", "accesslog")
_SYSTEM: Final = ("meminfo", "loadavg", "version", "self/cgroup", "self/limits")
_SECRET: Final = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|_KEY", re.IGNORECASE)
_SHOWN_KEYS: Final = frozenset({"STEPFS_SSE_KMS_KEY_ID"})
_PREFIXES: Final = ("STEPFS_", *settings.PREFIXES, "NOTIFY_SOCKET", "WATCHDOG_")
_UNSAFE: Final = re.compile(r"[^0-9A-Za-z._-]+")


def write_bundle(path: Path, report: str) -> None:
    """Write the file (0600); `RefusedError` if it is there already or cannot be made. `report`: the doctor's findings."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise RefusedError(f"{path} is there already; name another file for the bundle") from None
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; name another file for the bundle") from error
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in _contents(report):
            body = redacted(text).encode(errors="backslashreplace")
            member = tarfile.TarInfo(f"stepfs-doctor/{name}")
            member.size, member.mtime, member.mode = len(body), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(body))


def _contents(report: str) -> Iterator[tuple[str, str]]:
    yield "report.txt", report
    yield "versions.json", _document(versions())
    yield "environment.json", _document(environment(os.environ))
    fuse = [line for line in _tail(Path("/proc/self/mountinfo")).splitlines() if " fuse" in line]
    yield "system/mountinfo", "".join(f"{line}\n" for line in fuse)
    for name in _SYSTEM:
        yield f"system/{name.replace('/', '-')}", _tail(Path("/proc") / name)
    directories = sorted({mounted.directory for mounted in mounts() if mounted.fstype == FSTYPE})
    for path in _other_logs({log_file(Path(directory)) for directory in directories}):
        yield f"logs/{_UNSAFE.sub('_', path.name)}", _tail(path)
    for directory in directories:
        place = _UNSAFE.sub("_", directory.strip("/")) or "root"
        yield f"mounts/{place}/log", _tail(log_file(Path(directory)))
        for name, text in _of_mount(Path(directory)).items():
            yield f"mounts/{place}/{name}", text


def _other_logs(of_mounts: set[Path]) -> list[Path]:
    """The newest logs of this user's daemons, without those of the mounts that stand."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError):
        for path in log_file(Path("/")).parent.glob("*.log"):
            status = path.lstat()  # a link may lead to a file that others must not see
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and path not in of_mounts:
                found.append((status.st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)[:_LOGS_MAX]]


def versions() -> dict[str, object]:
    """The versions of all installed packages, of Python and of the system."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(found.items(), key=lambda item: item[0].lower())),
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that stepfs and the AWS chain read; secret-sounding ones without their values."""
    return {
        name: "[redacted]" if _SECRET.search(name) and name not in _SHOWN_KEYS else value
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIXES)
    }


def _of_mount(directory: Path) -> dict[str, str]:
    """The control files of a mount; if it does not answer in time, those that arrived."""
    texts = dict.fromkeys(_FILES, f"no answer within {ANSWER_S:g} s\n")

    def read() -> None:
        for name in _FILES:
            texts[name] = _tail(directory / ".stepfs" / name)

    answer_within(read)
    return dict(texts)


def _tail(path: Path) -> str:
    """The newest bytes of a file, which may report no size; or the reason why there are none."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _TEXT_BYTES_MAX:
                file.seek(-_TEXT_BYTES_MAX, os.SEEK_END)
            return file.read()[-_TEXT_BYTES_MAX:].decode(errors="replace")
    except OSError as error:
        return f"{path}: {error.strerror}\n"


def _document(body: object) -> str:
    return json.dumps(body, indent=2) + "\n"
