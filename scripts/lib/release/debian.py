"""From an empty Debian to a DataLoader, by the README alone: its own lines are run, in a root file system of debootstrap.

What they need of this machine is Python's package index as pip is configured here, /dev/fuse, and the wheel.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from release.network import of_this_machine
from release.rootfs import bootstrap, entered
from release_checks.wheel import readme_blocks
from stepfs.errors import StepfsError

MIRROR: Final = "http://deb.debian.org/debian"
_README: Final = Path(__file__).resolve().parents[3] / "README.md"
_INSTALL: Final = re.compile(
    r"^[#$] ((?:apt-get|python3 -m venv|pip install) .*?)(?: {2,}#.*)?$", re.MULTILINE
)
_LOADER: Final = """
import glob, numpy, torch

class Steps(torch.utils.data.Dataset):
    def __init__(self, root, rank):
        self.paths = sorted(glob.glob(f"{root}/step-*/rank-{rank:05d}.npy"))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, step):
        return torch.from_numpy(numpy.load(self.paths[step]))

loader = torch.utils.data.DataLoader(Steps("run", rank=1), batch_size=None, num_workers=2)
total = sum(int(batch.sum()) for batch in loader)
assert (len(loader), total) == (8, sum(sum(range(start + 512, start + 1024)) for start in range(0, 8192, 1024))), total
"""
SHELL: Final = ("bash", "-c", "exec 3>&1 >&2; . /dev/stdin")
_CALM: Final = 'apt-get() { command apt-get -qq -y "$@"; }; pip() { command pip -q "$@"; }; HOME=$PWD\n'


def install_lines() -> list[str]:
    """The commands of the README's section Install that a machine with nothing but Debian needs, in order."""
    readme = _README.read_text()
    section = readme[readme.index("## Install") :]
    lines = _INSTALL.findall(section[: section.index("\n## ", 1)])
    if [line.split()[0] for line in lines[:3]] != ["apt-get", "python3", "pip"]:
        raise StepfsError(
            f"README.md, Install: expected apt-get, python3 -m venv, pip install; found {lines}"
        )
    return lines


def steps() -> list[tuple[str, str]]:
    """What is timed, and its shell commands, which run in one shell."""
    init, producer = readme_blocks()
    return [
        *((line.split("  ")[0], line) for line in install_lines()),
        ("stepfs init", init),
        ("a producer commits", f"python -c '{producer}'"),
        ("stepfs mount", 'mkdir run; stepfs mount "file://$PWD/counting" run'),
        ("a DataLoader reads", f"python -c '{_LOADER}'"),
        ("stepfs unmount", "stepfs unmount run"),
    ]


def script_of(timed: Sequence[tuple[str, str]]) -> str:
    """The commands, for `SHELL`: each is followed by a line on descriptor 3 with the time and its name."""
    lines = ["set -eu", _CALM, "apt-get update"]
    for name, command in [("", ":"), *timed]:
        lines += [command, f"printf '%s\\t%s\\n' \"$(date +%s.%N)\" {shlex.quote(name)} >&3"]
    return "\n".join(lines)


def try_debian(wheel: Path, suite: str, mirror: str, say: Callable[[str], None]) -> float:
    """Try it in an empty Debian; returns the seconds from the first line of the README to the last batch."""
    network = of_this_machine()
    with tempfile.TemporaryDirectory(prefix="stepfs-debian-", ignore_cleanup_errors=True) as work:
        say(f"debootstrap of an empty {suite}")
        root = bootstrap(suite, Path(work) / "root", mirror)
        (root / "work/dist").mkdir(parents=True)
        shutil.copy2(wheel, root / "work/dist")
        network.remember(root)
        variables = {"DEBIAN_FRONTEND": "noninteractive", **network.variables}
        shell = ["env", "--chdir=/work", *SHELL]
        done = subprocess.run(
            entered(root, shell, variables=variables, devices=["fuse"], bound=network.paths),
            input=script_of(steps()),
            capture_output=True,
            text=True,
            check=False,
        )
        return report(suite, done, steps(), say)


def report(
    suite: str,
    done: subprocess.CompletedProcess[str],
    timed: Sequence[tuple[str, str]],
    say: Callable[[str], None],
) -> float:
    """Say what each step took; their sum. `StepfsError` names the step that failed."""
    spans = list(_spans(done.stdout))
    for name, seconds in spans:
        say(f"{seconds:6.1f} s  {name}")
    if done.returncode != 0 or len(spans) != len(timed):
        failed = timed[len(spans)][0] if len(spans) < len(timed) else "the end"
        raise StepfsError(f"{suite}: `{failed}` failed: {' | '.join(done.stderr.splitlines()[-5:])}")
    return sum(seconds for _, seconds in spans)


def _spans(printed: str) -> Iterator[tuple[str, float]]:
    """The steps that ended, with their seconds."""
    lines = [line.partition("\t") for line in printed.splitlines()]
    for (before, _, _), (at, _, name) in pairwise(lines):
        yield name, float(at) - float(before)
