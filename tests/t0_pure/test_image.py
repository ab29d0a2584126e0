"""The image: what its Containerfile says, and, by a nightly test where there is a builder, what it makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import tools
from finished import ran

from release_checks.wheel import readme_blocks
from stepfs import __version__

DEPLOY = tools.ROOT / "scripts/deploy"
LINES = [
    tuple(line.split(" ", 1))
    for line in (DEPLOY / "Containerfile").read_text().splitlines()
    if line and not line.startswith("#")
]
INIT, PRODUCER = readme_blocks()
USED = f"""
set -eu
stepfs doctor
{INIT}
python -c '{PRODUCER}'
mkdir run
stepfs mount "file://$PWD/counting" run --group smoke --allow-other
python -c 'import glob, numpy; print(sum(int(numpy.load(name).sum()) for name in glob.glob("run/step-*/*.npy")))'
stepfs unmount run --checkpoint 5
stepfs reclaim "file://$PWD/counting" --grace 0
stepfs ls "file://$PWD/counting"
"""


def said(instruction: str, lines: list[tuple[str, ...]]) -> list[str]:
    return [rest for name, rest in lines if name == instruction]


def test_every_command_of_it_is_one_that_a_shell_reads():
    for command in said("RUN", LINES):
        subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.fixture
def checkout(tmp_path):
    for name in ("scripts/image", "fs/stepfs/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tools.ROOT / name, tmp_path / name)
    (tmp_path / "dist").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "sed"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def image(checkout, *arguments):
    command = [checkout / "bin/bash", checkout / "scripts/image", *arguments]
    return ran(command, env={"PATH": str(checkout / "bin")})


def test_what_is_missing_is_said(checkout):
    done = image(checkout)
    assert (done.returncode, "run scripts/release first" in done.stderr) == (3, True)
    (checkout / f"dist/stepfs-{__version__}-py3-none-any.whl").touch()
    done = image(checkout)
    assert (done.returncode, "none of buildah, podman and docker" in done.stderr) == (4, True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], f"-t stepfs:{__version__}"),
        (["r.example/s:1"], "-t r.example/s:1"),
        (["r.example/s:1-ray", "ray,images"], "--build-arg EXTRAS=ray,images -t r.example/s:1-ray"),
    ],
)
def test_the_first_builder_there_is_gets_the_containerfile(checkout, given, words):
    (checkout / f"dist/stepfs-{__version__}-py3-none-any.whl").touch()
    for name in ("podman", "docker"):
        (checkout / "bin" / name).write_text(f'#!{checkout}/bin/bash\necho {name} "$@"\n')
        (checkout / "bin" / name).chmod(0o755)
    done = image(checkout, *given)
    assert done.stdout == f"podman build -f scripts/deploy/Containerfile {words} .\n"


def runtime() -> str | None:
    """A program that can build here and run what it built."""
    for name in ("podman", "docker"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_where_there_is_a_builder_the_image_mounts_produces_and_reclaims(tmp_path):
    program = runtime()
    if program is None:
        return  # the tests above are what can be checked without one
    (tmp_path / "dist").mkdir()
    shutil.copy(tools.ROOT / "constraints.lock.txt", tmp_path)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path / "dist"]
    subprocess.run(command, cwd=tools.ROOT, check=True, capture_output=True)
    tag = f"stepfs-test:{os.getpid()}"
    subprocess.run([program, "build", "-f", DEPLOY / "Containerfile", "-t", tag, tmp_path], check=True)
    try:
        fuse = ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor=unconfined"]
        command = [
            program, "run", "--rm", *fuse, "--entrypoint", "/usr/bin/tini", tag, "--", "sh", "-c", USED,
        ]  # fmt: skip
        done = ran(command, check=True, timeout=None)
        lines = done.stdout.splitlines()
        assert str(sum(range(8192))) in lines
        assert lines[-3:] == [f"step-00000000{step}" for step in (5, 6, 7)]
        done = ran([program, "run", "--rm", tag, "--version"], check=True)
        assert done.stdout == f"stepfs {__version__}\n"
        for module in ("obstore", "pyarrow", "zstandard", "tokenizers", "jinja2"):
            ran([program, "run", "--rm", "--entrypoint", "python", tag, "-c", f"import {module}"], check=True)
    finally:
        subprocess.run([program, "rmi", tag], capture_output=True, check=False)
