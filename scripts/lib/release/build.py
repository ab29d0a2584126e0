"""Building sdist and wheel, twice: at two places, at two times, under two users' settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from release.source import Source
from stepfs.errors import StepfsError

Target = Literal["sdist", "wheel"]
_SUFFIX: Final = {"sdist": ".tar.gz", "wheel": ".whl"}
# Circumstances that must not matter: another time zone, language, order of sets and default permissions.
_OTHERWISE: Final = {"TZ": "Pacific/Chatham", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
_OTHER_UMASK: Final = 0o077


def build(
    tree: Path,
    target: Target,
    directory: Path,
    epoch: int,
    *,
    settings: Mapping[str, str] | None = None,
    umask: int = 0o022,
) -> Path:
    """Build one file of the tree into the directory, without the network. `StepfsError` with the builder's words."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HATCH_")}
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(directory)],
        cwd=tree,
        env={**kept, "SOURCE_DATE_EPOCH": str(epoch), **(settings or {})},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )
    if done.returncode != 0:
        *_, reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise StepfsError(f"the {target} of {tree} cannot be built: {reason}")
    (built,) = directory.glob(f"*{_SUFFIX[target]}")
    return built


def build_twice(source: Source, directory: Path) -> list[Path]:
    """Sdist and wheel, below `directory`. `StepfsError` if a second build differs, or a wheel made from the sdist."""
    source.export(directory / "first")
    sdist = build(directory / "first", "sdist", directory / "built", source.epoch)
    wheel = build(directory / "first", "wheel", directory / "built", source.epoch)

    again = directory / "the second/place"
    again.parent.mkdir()
    source.export(again)
    for path in again.rglob("*"):
        os.utime(path, follow_symlinks=False)
    second = build(again, "sdist", directory / "again", source.epoch, settings=_OTHERWISE, umask=_OTHER_UMASK)
    unpacked = directory / "unpacked"
    unpacked.mkdir()
    subprocess.run(["tar", "-x", "-f", str(sdist), "-C", str(unpacked)], check=True)
    (tree,) = unpacked.iterdir()
    of_sdist = build(tree, "wheel", directory / "again", source.epoch, settings=_OTHERWISE, umask=_OTHER_UMASK)
    for one, other in ((sdist, second), (wheel, of_sdist)):
        if one.name != other.name or one.read_bytes() != other.read_bytes():
            raise StepfsError(f"{one.name} is not reproducible: compare {one} and {other}")
    return [sdist, wheel]
