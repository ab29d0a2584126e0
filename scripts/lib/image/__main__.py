"""`scripts/image`: reads the Dockerfile, makes the root file system, and writes it as an OCI image."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from image.dockerfile import parse
from image.layout import write_layout
from image.network import of_this_machine
from image.rootfs import check_sources, make_stages
from stepfs import __version__
from stepfs.errors import RefusedError, StepfsError

ROOT: Final = Path(__file__).resolve().parents[3]
DOCKERFILE: Final = ROOT / "scripts/deploy/Dockerfile"
MIRROR: Final = "http://deb.debian.org/debian"


def say(text: str) -> None:
    print(f"image: {text}", flush=True)


def make_image(context: Path, target: Path, *, mirror: str = MIRROR, rootfs: Path | None = None) -> None:
    """Write the OCI layout `target`, and keep the root file system at `rootfs` if that is given."""
    _check_tools()
    stages = parse(DOCKERFILE.read_text())
    check_sources(stages, context)
    with tempfile.TemporaryDirectory(prefix="stepfs-image-", ignore_cleanup_errors=True) as work:
        root = make_stages(stages, context, Path(work), mirror, of_this_machine(), say)
        say(f"writing {target}")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_layout(root, stages[-1], target, __version__)
        if rootfs is not None:
            shutil.move(root, rootfs)


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise RefusedError(
            "a root file system is made by root: run scripts/image with sudo, or docker build (see --help)"
        )
    missing = [program for program in ("debootstrap", "umoci", "unshare") if shutil.which(program) is None]
    if missing:
        raise RefusedError(f"missing: {' '.join(missing)}; run: apt-get install {' '.join(missing)}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/image",
        description="Make an OCI image of dist/'s wheel without docker and without a registry.",
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "dist/image", help="directory for the OCI layout"
    )
    parser.add_argument("--rootfs", type=Path, help="keep the root file system in this new directory as well")
    parser.add_argument("--mirror", default=MIRROR, help="of Debian's packages")
    options = parser.parse_args()
    if options.rootfs is not None and options.rootfs.exists():
        parser.error(f"{options.rootfs} is there already: name a new directory")
    try:
        make_image(ROOT, options.output, mirror=options.mirror, rootfs=options.rootfs)
    except StepfsError as error:
        print(f"image: {error}", file=sys.stderr)
        return error.exit_code
    say(
        f"done; for example: skopeo copy oci:{options.output}:{__version__} docker://REGISTRY/stepfs:{__version__}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
