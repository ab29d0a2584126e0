"""A root file system as an OCI image: a directory that skopeo, podman and ctr read, without a registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from image.dockerfile import Stage
from stepfs.errors import StepfsError


def write_layout(root: Path, stage: Stage, target: Path, tag: str) -> None:
    """Replace `target` by an OCI layout with one image of one layer."""
    new = target.with_name(f".new-{target.name}")
    shutil.rmtree(new, ignore_errors=True)
    _umoci("init", "--layout", str(new))
    image = f"{new}:{tag}"
    _umoci("new", "--image", image)
    _umoci("insert", "--image", image, str(root), "/")
    options = [f"--config.user={stage.user}", f"--config.workingdir={stage.directory}"]
    options += [f"--config.entrypoint={word}" for word in stage.entrypoint]
    options += [f"--config.cmd={word}" for word in stage.command]
    options += [f"--config.env={name}={value}" for name, value in stage.variables.items()]
    options += [f"--config.label={name}={value}" for name, value in stage.labels.items()]
    _umoci("config", "--image", image, *options)
    _umoci("gc", "--layout", str(new))
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def _umoci(*words: str) -> None:
    done = subprocess.run(["umoci", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StepfsError(f"umoci {words[0]}: {' '.join(done.stderr.split()[-40:])}")
