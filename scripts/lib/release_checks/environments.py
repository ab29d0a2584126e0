"""Virtual environments with the wheel in them and without the source tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOCK = ROOT / "constraints.lock.txt"
_COMMAND_S = 900.0


class CheckFailedError(Exception):
    """A command ended with an error; the message is its output."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One virtual environment."""

    directory: Path

    @classmethod
    def create(cls, interpreter: str, directory: Path) -> Environment:
        """With the locked pip: older ones know no dependency groups."""
        run([interpreter, "-m", "venv", str(directory)])
        created = cls(directory)
        created.install("pip", locked=True)
        return created

    def program(self, name: str) -> str:
        return str(self.directory / "bin" / name)

    def install(self, *what: str, locked: bool) -> None:
        lock = ["-c", str(LOCK)] if locked else []
        run([self.program("python"), "-m", "pip", "install", "-qq", *lock, *what], directory=ROOT)


def interpreter(version: str) -> str | None:
    """A working Python of that minor version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = shutil.which(f"python{version}")
    kept = sorted((pyenv / "versions").glob(f"{version}.*/bin/python"))
    for candidate in [*([found] if found else []), *map(str, kept)]:
        question = [candidate, "-c", "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"]
        said = subprocess.run(question, capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:  # a shim of pyenv may exist and answer nothing
            return candidate
    return None


def run(command: Sequence[str], *, directory: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed; without a PYTHONPATH that would show it the source tree.

    Raises `CheckFailedError`.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=directory, env={**kept, **(environment or {})}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=_COMMAND_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = re.sub(r"\n{2,}", "\n", done.stdout[-6000:] + done.stderr[-3000:])
        raise CheckFailedError(f"{' '.join(command[:6])} … ended with exit code {done.returncode}:\n{said}")
    return done.stdout
