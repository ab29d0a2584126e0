"""The root file system of an empty Debian, and commands in it.

Each command has a mount and a process namespace of its own: however it ends, no mount and no process is left.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stepfs.errors import StepfsError

_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
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


def bootstrap(suite: str, root: Path, mirror: str) -> Path:
    """The least Debian there is. `StepfsError` with debootstrap's words."""
    _run(["debootstrap", "--variant=minbase", suite, str(root), mirror])
    return root


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
