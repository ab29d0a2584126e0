"""The check of the wheel behind `scripts/test --slow`; exit 1 with the output of what failed."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from release_checks.environments import CheckFailedError, Environment, build_wheel
from release_checks.wheel import check_wheel


def main() -> int:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stepfs-release-") as name:
        directory = Path(name)
        try:
            wheel = build_wheel(directory / "dist")
            environment = Environment.create(sys.executable, directory / "venv")
            environment.install(str(wheel), locked=True)
            check_wheel(environment, directory)
        except CheckFailedError as error:
            print(f"test: {error}", file=sys.stderr)
            return 1
    print(f"test: {'wheel':16} ok  {time.monotonic() - started:3.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
