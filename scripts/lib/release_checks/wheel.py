"""The wheel alone: installed without torch and without the source tree, it does as the README shows.

init, the README's own producer, mount, read, unmount with a checkpoint, reclaim; and what needs an extra says which.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Final

from release_checks.environments import ROOT, CheckFailedError, Environment, run

_FENCE: Final = re.compile(r"^```(?:sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_STEPS: Final = 8  # of the README's producer: positions 0 to 8192 by 1024
_RESUMES_AT: Final = 5
_HOME: Final = """
import sys, stepfs, stepfs_producer
assert stepfs.__file__.startswith(sys.argv[1]) and stepfs_producer.__file__.startswith(sys.argv[1]), stepfs.__file__
print(stepfs.__version__)
"""
_READ: Final = """
import glob, numpy
files = sorted(glob.glob("mounted/step-*/rank-*.npy"))
print(len(files), int(numpy.concatenate([numpy.load(file) for file in files]).sum()))
"""
_PLAN: Final = """
version: 1
output: {mesh: dp=2, ext: .safetensors, sequence_length: 64, micro_batch_tokens: 128}
sources: {words: {format: text, files: corpus.txt}}
mix: {words: 1}
until: {steps: 3}
"""
_NEEDS_EXTRA: Final = {
    ("text", "file:///nowhere", "--input", ".", "--slices", "1"): "stepfs[produce]",
    ("check", "plan.yaml"): "stepfs[produce]",
}


def readme_blocks() -> tuple[str, str]:
    """The command that makes the lake of the README's producer, and the producer itself."""
    readme = (ROOT / "README.md").read_text()
    init, producer = _FENCE.findall(readme[readme.index("## Produce") :])[:2]
    return init, producer


def check_wheel(environment: Environment, directory: Path, *, extras: bool = False) -> None:
    """From `stepfs --help` to the reclaimed steps; without `extras`, what needs one says so. Raises `CheckFailedError`."""
    tried = _Tried(environment, directory)
    for program in ("stepfs", "stepfs-produce"):
        tried.expect("Usage:", tried.run(program, "--help"))
    version = tried.run("python", "-c", _HOME, str(environment.directory)).strip()
    tried.expect(f"stepfs {version}", tried.run("python", "-m", "stepfs", "--version"))
    for command, extra in () if extras else _NEEDS_EXTRA.items():
        tried.expect_refusal(extra, "stepfs-produce", *command)
    _live(tried)


def check_produce(environment: Environment, directory: Path) -> None:
    """With the extra `produce` and without torch, text becomes steps, by `text` and by a plan. Raises `CheckFailedError`."""
    tried = _Tried(environment, directory)
    tried.expect("False", tried.run("python", "-c", "import importlib.util as u; print(bool(u.find_spec('torch')))"))
    (directory / "corpus.txt").write_text("words of a text\n" * 500)
    (directory / "plan.yaml").write_text(_PLAN)
    options = ("--input", "corpus.txt", "--slices", "2", "--ext", ".npy", "--seq-len", "64")
    tried.expect("all committed", tried.run("stepfs-produce", "text", (directory / "text").as_uri(), *options))
    tried.expect("all committed", tried.run("stepfs-produce", "run", "plan.yaml", (directory / "planned").as_uri()))


def _live(tried: _Tried) -> None:
    """A lake from `init` to `reclaim`."""
    lake, (init, producer) = (tried.directory / "counting").as_uri(), readme_blocks()
    (tried.directory / "mounted").mkdir()
    run(["bash", "-euc", init], directory=tried.directory, environment=tried.variables)
    tried.run("python", "-c", producer)
    tried.run("stepfs", "mount", lake, "mounted", "--group", "smoke", "--cache-dir", str(tried.directory / "cache"))
    try:
        total = 1024 * _STEPS * (1024 * _STEPS - 1) // 2
        tried.expect(f"{2 * _STEPS} {total}", tried.run("python", "-c", _READ))
        tried.run("stepfs", "unmount", "mounted", "--checkpoint", str(_RESUMES_AT))
    finally:  # a mount that is gone already answers with an error
        subprocess.run(
            [tried.environment.program("stepfs"), "unmount", str(tried.directory / "mounted")],
            check=False,
            capture_output=True,
        )
    tried.run("stepfs", "verify", lake)
    tried.run("stepfs", "reclaim", lake, "--grace", "0")
    live = [step["step"] for step in json.loads(tried.run("stepfs", "ls", lake, "--json"))["steps"]]
    if live != list(range(_RESUMES_AT, _STEPS)):
        raise CheckFailedError(f"behind a checkpoint at step {_RESUMES_AT}, reclaim left the steps {live}")


class _Tried:
    """The programs of one environment, run in one directory."""

    def __init__(self, environment: Environment, directory: Path) -> None:
        self.environment, self.directory = environment, directory
        path = f"{environment.directory / 'bin'}:{os.environ['PATH']}"
        self.variables = {"STEPFS_LOG_DIR": str(directory), "PATH": path}

    def run(self, program: str, *words: str) -> str:
        command = [self.environment.program(program), *words]
        return run(command, directory=self.directory, environment=self.variables)

    def expect(self, text: str, said: str) -> None:
        if text not in said:
            raise CheckFailedError(f"expected {text!r} in {said!r}")

    def expect_refusal(self, text: str, program: str, *words: str) -> None:
        """The command must end with 2 and one line that holds the text."""
        try:
            self.run(program, *words)
        except CheckFailedError as error:
            if "exit code 2" in str(error) and text in str(error) and "Traceback" not in str(error):
                return
            raise
        raise CheckFailedError(f"{program} {words[0]} works without {text}")
