"""`scripts/release --try-debian`: the README's own lines, from an empty Debian to a DataLoader, timed."""

from __future__ import annotations

import subprocess
import time

import pytest
import tools

from release.build import build
from release.debian import MIRROR, SHELL, install_lines, report, script_of, steps, try_debian
from stepfs import __version__
from stepfs.errors import StepfsError

BOUND_S = 600.0


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("suite", ["bookworm"])
def test_from_an_empty_debian_to_a_data_loader_in_ten_minutes(suite, tmp_path):
    wheel = build(tools.ROOT, "wheel", tmp_path / "dist", int(time.time()))
    said = []
    assert try_debian(wheel, suite, MIRROR, said.append) <= BOUND_S
    assert [line.split(" s  ")[1] for line in said[1:]] == [name for name, _ in steps()]


def test_the_lines_are_the_readmes_and_name_the_wheel_of_this_version():
    packages, environment, light, *extras = install_lines()
    assert packages.startswith("apt-get install --no-install-recommends python3-venv ")
    assert "activate" in environment
    wheel = f"dist/stepfs-{__version__}-py3-none-any.whl"
    assert light == f"pip install {wheel}"
    assert f"pip install '{wheel}[torch]'" in extras
    names = [name for name, _ in steps()]
    assert names[: len(extras) + 3] == install_lines()
    assert names[-5:] == [
        "stepfs init", "a producer commits", "stepfs mount", "a DataLoader reads", "stepfs unmount",
    ]  # fmt: skip


def tried(timed, tmp_path):
    for name in ("apt-get", "pip"):
        (tmp_path / name).write_text("#!/bin/sh\necho quiet\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        SHELL,
        input=script_of(timed),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        timeout=60,
    )


def test_steps_are_timed_and_share_a_shell(tmp_path):
    timed = [
        ("it's set", "here=$PWD"),
        ("used", 'echo noise; test "$here" = "$PWD"'),
        ("none left", "! read line"),
    ]
    said = []
    total = report("bookworm", tried(timed, tmp_path), timed, said.append)
    assert [line.split(" s  ")[1] for line in said] == ["it's set", "used", "none left"]
    assert 0 <= total < 60


def test_the_step_that_fails_is_named_with_what_it_said(tmp_path):
    timed = [("one", ":"), ("two", "echo no room >&2; false"), ("three", ":")]
    said = []
    with pytest.raises(StepfsError, match=r"bookworm: `two` failed: .*no room"):
        report("bookworm", tried(timed, tmp_path), timed, said.append)
    assert len(said) == 1
