"""Small lakes for the tests of the command line, and a way to run it in this process."""

from __future__ import annotations

import functools
import json
import os
import subprocess

from finished import without_progress
from typer import Typer, testing
from typer.main import get_command
from typer.testing import CliRunner

from stepfs.cli.app import app
from stepfs_producer import Producer
from stepfs_producer.cli.app import app as producer_app

SLICES = 3
setattr(testing, "_get_command", functools.cache(get_command))  # noqa: B010 (no public name) - made anew for each call


class Ended(subprocess.CompletedProcess[str]):
    """How a command ended."""

    @property
    def code(self) -> int:
        return self.returncode

    @property
    def out(self) -> str:
        return self.stdout

    @property
    def err(self) -> str:
        """But for lines of progress, which `stderr` has."""
        return without_progress(self.stderr)

    @property
    def document(self):
        return json.loads(self.stdout)


def stepfs(*arguments: object, env: dict[str, str] | None = None) -> Ended:
    return _ended(app, arguments, env)


def produce(*arguments: object, env: dict[str, str] | None = None) -> Ended:
    """`stepfs-produce` in this process: starting one takes longer than what most tests have to say."""
    return _ended(producer_app, arguments, env)


def _ended(program: Typer, arguments: tuple[object, ...], env: dict[str, str] | None) -> Ended:
    words = [str(argument) for argument in arguments]
    # A command that does not know a variable asks all others, which takes longer than what it does.
    variables = {"STEPFS_GRACE": os.environ["STEPFS_GRACE"] if "reclaim" in words[:1] else None, **(env or {})}
    done = CliRunner().invoke(program, words, env=variables, catch_exceptions=False)
    return Ended(words, done.exit_code, done.stdout, done.stderr)


def payloads(step: int) -> list[bytes]:
    return [f"step {step} slice {index}".encode() * (100 + index) for index in range(SLICES)]


def commit(url: str, steps: range, *, producer_id: str = "tok-0") -> None:
    with Producer(url, producer_id=producer_id) as producer:
        for step in steps:
            producer.append(payloads(step), position=step + 1)
