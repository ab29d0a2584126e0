"""`scripts/release`: builds, compares, inspects, and puts the result into dist/."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Final

from release.build import build_twice
from release.dist import publish
from release.inspection import inspect
from release.source import source_of
from release_checks.__main__ import check
from stepfs.errors import StepfsError

ROOT: Final = Path(__file__).resolve().parents[3]


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def release(root: Path, dist: Path) -> Path:
    """Build the release of the tree at `root` into `dist`; returns the wheel."""
    source = source_of(root)
    with tempfile.TemporaryDirectory(prefix="stepfs-release-") as work:
        sdist, wheel = build_twice(source, Path(work))
        metadata = inspect(sdist, wheel)
        at = source.commit[:12] if source.commit else "a tree without history"
        say(f"{metadata.name} {metadata.version} of {at}, SOURCE_DATE_EPOCH={source.epoch}")
        say("built twice, also the wheel from the sdist: equal bytes; metadata and contents are valid")
        for name, digest in publish([sdist, wheel], dist).items():
            say(f"{digest}  {dist.name}/{name}")
    return dist / wheel.name


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description="Build a release into dist/; upload nothing.")
    parser.add_argument("--check", action="store_true", help="try the wheel in bare environments on each Python found")
    options = parser.parse_args()
    try:
        wheel = release(ROOT, ROOT / "dist")
    except StepfsError as error:
        print(f"release: {error}", file=sys.stderr)
        return error.exit_code
    if options.check:
        return check(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
