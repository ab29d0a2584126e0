"""Environments of programs that are only measured here: one each, made on demand and kept for the next run.

They lie under `~/.cache/stepfs-bench` and share what this project's environment has already (torch alone is 700 MB),
below whatever versions they asked for themselves. torch keeps its version there: any other pulls gigabytes.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

_INSTALL_S_MAX = 900.0
_DONE = "installed"


class NotInstalledError(Exception):
    """A program that cannot be had on this machine; the message says why."""


def home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepfs-bench"


def environment(name: str, requirements: Sequence[str], say: Callable[[str], None]) -> Path:
    """The `bin` directory of the environment with these packages. `NotInstalledError` if pip cannot make it."""
    key = hashlib.sha256("\n".join([platform.python_version(), *requirements]).encode()).hexdigest()[:8]
    place = home() / f"{name}-{key}"
    python = place / "bin" / "python"
    if not (place / _DONE).exists():
        say(f"installing {' '.join(requirements)} into {place}")
        shutil.rmtree(place, ignore_errors=True)  # what an install that failed has left
        _run([sys.executable, "-m", "venv", "--without-pip", str(place)])
    _share(python)
    if not (place / _DONE).exists():
        constraints = place / "constraints.txt"
        constraints.write_text(f"torch=={version('torch').partition('+')[0]}\n", encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        _run(["nice", *pip, "-c", str(constraints), *requirements])
        (place / _DONE).touch()
    return python.parent


def _share(python: Path) -> None:
    """Let it find this project's packages, after its own. Done in each run: checkouts share the environments."""
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    shared = packages / "shared_with_stepfs.pth"
    wanted = sysconfig.get_path("purelib") + "\n"
    if not shared.exists() or shared.read_text(encoding="utf-8") != wanted:
        new = shared.with_suffix(".new")
        new.write_text(wanted, encoding="utf-8")
        new.replace(shared)


def _run(command: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_INSTALL_S_MAX,
            env=environ,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{Path(command[0]).name} took longer than {_INSTALL_S_MAX:g} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        wrong = [line for line in lines if line.startswith("ERROR")] or lines
        raise NotInstalledError(wrong[-1] if wrong else f"ended with {done.returncode}")
