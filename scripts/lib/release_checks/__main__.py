"""The checks of a wheel, by default of this tree as it is: behind `scripts/test --nightly` and `scripts/release --check`."""

from __future__ import annotations

import sys
import tempfile
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from release_checks.environments import ROOT, CheckFailedError, Environment, interpreter, run
from release_checks.wheel import check_produce, check_wheel
from release_checks.wheelhouse import EXTRAS, PYTHONS, fill


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stepfs-wheel-") as name:
        if not sys.argv[1:]:
            run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", name], directory=ROOT)
        return check(Path(sys.argv[1]) if sys.argv[1:] else next(Path(name).glob("*.whl")))


def check(wheel: Path) -> int:
    """The exit code: 0 if it works in a bare environment on each Python found, and with the lowest versions."""
    with tempfile.TemporaryDirectory(prefix="stepfs-release-") as name:
        directory = Path(name)
        try:
            for version in PYTHONS:
                found = interpreter(version)
                if found is None:
                    print(f"test: python {version} not found on this machine: not tested", flush=True)
                else:
                    _try(f"wheel on {version}", found, directory / version, str(wheel), locked=True)
            lowest = [str(wheel), *lowest_versions()]
            _try_wheelhouse(directory / "house", wheel)
            _try("lowest versions", sys.executable, directory / "lowest", *lowest, locked=False)
        except CheckFailedError as error:
            print(f"test: {error}", file=sys.stderr)
            return 1
    return 0


def lowest_versions() -> list[str]:
    """`name==version`, the lowest that pyproject.toml admits, of each dependency; each must have that bound and no other."""
    pins = []
    for dependency in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        wanted = Requirement(dependency)
        if [bound.operator for bound in wanted.specifier] != [">="]:
            raise ValueError(f"pyproject.toml: {dependency}: give it one lower bound, name>=version")
        pins += [f"{wanted.name}=={bound.version}" for bound in wanted.specifier]
    return pins


def _try_wheelhouse(directory: Path, wheel: Path) -> None:
    """On a machine that looks as if it had no compiler, without an index."""
    started = time.monotonic()
    fill(directory / "wheels", wheel, [sys.executable])
    environment = Environment.create(sys.executable, directory / "venv")
    words = ["--no-index", "--find-links", str(directory / "wheels"), f"stepfs[{EXTRAS}]"]
    run([environment.program("pip"), "install", "-q", *words], environment={"CC": "false", "PATH": "/bin"})
    check_wheel(environment, directory, extras=True)
    check_produce(environment, directory)
    print(f"test: {'wheelhouse':16} ok  {time.monotonic() - started:3.0f} s", flush=True)


def _try(check: str, python: str, directory: Path, *installed: str, locked: bool) -> None:
    started = time.monotonic()
    environment = Environment.create(python, directory / "venv")
    environment.install(*installed, locked=locked)
    check_wheel(environment, directory)
    print(f"test: {check:16} ok  {time.monotonic() - started:3.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
