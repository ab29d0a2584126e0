"""Root file systems of stages: debootstrap in place of FROM, chroot in place of RUN.

Each command has a mount and a process namespace of its own: however it ends, no mount and no process is left.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from image.dockerfile import Copy, Run, Stage
from image.network import Network
from stepfs.errors import AbsentError, StepfsError

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
# What the slim images of Debian leave out as well, and what a package manager leaves behind.
_SUPERFLUOUS: Final = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache/apt", "var/lib/apt/lists",
    "var/cache/debconf", "var/log/dpkg.log", "var/log/alternatives.log", "var/log/apt", "var/log/bootstrap.log",
)  # fmt: skip
_ENTER: Final = """
set -eu
root=$1; shift
mount --bind "$root" "$root"
mount -t tmpfs -o mode=0755 none "$root/dev"
mount -t proc none "$root/proc"
mkdir "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
for device in $DEVICES; do cp -a "/dev/$device" "$root/dev/$device"; chmod 0666 "$root/dev/$device"; done
mount -t tmpfs none "$root/mnt"
for path in $BOUND; do
    inside=$root/mnt$path
    mkdir -p "$(dirname "$inside")"
    if [ -d "$path" ]; then mkdir -p "$inside"; else : >"$inside"; fi
    mount --rbind "$path" "$inside"
done
exec chroot "$root" env -i "$@"
"""


def entered(
    root: Path,
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    devices: Sequence[str] = (),
    bound: Sequence[str] = (),
) -> list[str]:
    """The command line that runs `command` in the root file system, as root, with these variables and no others.

    `devices`: of /dev, besides the usual ones; `bound`: paths of this machine, which appear below /mnt.
    """
    given = {"PATH": _PATH, "HOME": "/root", "LC_ALL": "C.UTF-8", **(variables or {})}
    listed = [f"DEVICES={' '.join([*_DEVICES, *devices])}", f"BOUND={' '.join(bound)}"]
    spaces = ["unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child"]
    words = [f"{name}={value}" for name, value in given.items()]
    return ["env", *listed, *spaces, "sh", "-c", _ENTER, "sh", str(root), *words, *command]


def check_sources(stages: Sequence[Stage], context: Path) -> None:
    """`AbsentError` for a file that a stage takes from the context and that is not there."""
    for stage in stages:
        for step in stage.steps:
            if isinstance(step, Copy) and step.stage is None:
                for name in step.sources:
                    if not (context / name).exists():
                        raise AbsentError(f"{context / name} does not exist; run scripts/release first")


def make_stages(
    stages: Sequence[Stage],
    context: Path,
    directory: Path,
    mirror: str,
    network: Network,
    say: Callable[[str], None],
) -> Path:
    """Make the root file system of each stage below `directory`; returns the last one."""
    bases: dict[str, Path] = {}
    made: dict[str | None, Path] = {}
    root = directory
    for number, stage in enumerate(stages):
        if stage.suite not in bases:
            say(f"debootstrap of {stage.suite}")
            bases[stage.suite] = bootstrap(stage.suite, directory / f"base-{stage.suite}", mirror)
        root = directory / f"stage-{number}"
        _run(["cp", "-a", "--reflink=auto", str(bases[stage.suite]), str(root)])
        made[stage.name] = root
        for step in stage.steps:
            if isinstance(step, Run):
                say(f"RUN {step.command[:100]}")
                _run_in(root, step, stage, network)
            else:
                _copy(step, root, context if step.stage is None else made[step.stage])
    network.forget(root)
    for name in _SUPERFLUOUS:
        shutil.rmtree(root / name, ignore_errors=True)
    return root


def bootstrap(suite: str, root: Path, mirror: str) -> Path:
    """The least Debian there is. `StepfsError` with debootstrap's words."""
    _run(["debootstrap", "--variant=minbase", suite, str(root), mirror])
    return root


def _run_in(root: Path, step: Run, stage: Stage, network: Network) -> None:
    variables = {"DEBIAN_FRONTEND": "noninteractive", **network.variables, **stage.variables}
    network.remember(root)
    _run(entered(root, ["sh", "-euc", step.command], variables=variables, bound=network.paths))


def _copy(step: Copy, root: Path, origin: Path) -> None:
    target = root / step.target.lstrip("/")
    for pattern in step.sources:
        found = origin / pattern.lstrip("/")
        if found.is_dir():
            shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True)
        else:
            into = target / found.name if step.target.endswith("/") else target
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, into)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )
    if done.returncode != 0:
        said = " | ".join(line for line in (done.stdout + done.stderr).splitlines()[-4:] if line.strip())
        shown = " ".join(command[-3:])
        raise StepfsError(f"`{shown}` ended with exit code {done.returncode}: {said}")
