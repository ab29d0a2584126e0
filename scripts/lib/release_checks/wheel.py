"""The wheel alone: installed without torch and without the source tree, it commits a step and shows it in a mount."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from release_checks.environments import CheckFailedError, Environment, run

_PRODUCE = """
import sys
import stepfs, stepfs_producer
assert stepfs.__file__.startswith(sys.argv[2]) and stepfs_producer.__file__.startswith(sys.argv[2]), stepfs.__file__
with stepfs_producer.Producer(sys.argv[1], producer_id="smoke") as producer:
    producer.append([b"left", b"right"], position=1)
    producer.flush()
"""


def check_wheel(environment: Environment, directory: Path) -> None:
    """From `stepfs --help` to the bytes of a file in a mount. Raises `CheckFailedError`."""
    stepfs, lake, mounted = (
        environment.program("stepfs"),
        (directory / "lake").as_uri(),
        directory / "mounted",
    )
    mounted.mkdir()

    def command(*words: str) -> str:
        return run([stepfs, *words], directory=directory, environment={"STEPFS_LOG_DIR": str(directory)})

    for program in ("stepfs", "stepfs-produce"):
        if "Usage:" not in run([environment.program(program), "--help"], directory=directory):
            raise CheckFailedError(f"{program} --help names no usage")
    command("init", lake, "--slices", "2", "--ext", ".bin")
    produce = [environment.program("python"), "-c", _PRODUCE, lake, str(environment.directory)]
    run(produce, directory=directory)
    listed = json.loads(command("ls", lake, "--json"))["steps"]
    if [step["step"] for step in listed] != [0]:
        raise CheckFailedError(f"stepfs ls shows {listed}, not one step")
    command("mount", lake, str(mounted), "--cache-dir", str(directory / "cache"))
    try:
        found = [path.read_bytes() for path in sorted((mounted / "step-000000000").iterdir())]
    finally:
        subprocess.run([stepfs, "unmount", str(mounted)], check=True, capture_output=True)
    if found != [b"left", b"right"]:
        raise CheckFailedError(f"the mount shows {found}")
    command("verify", lake)
