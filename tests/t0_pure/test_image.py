"""The image: one Dockerfile, which docker and scripts/image read alike. The image itself is tried by a slow test."""

from __future__ import annotations

import os
import re

import pytest

from image import network
from image.__main__ import DOCKERFILE, make_image
from image.dockerfile import Copy, Run, Stage, parse
from image.layout import write_layout
from release.debian import install_lines
from stepfs import __version__
from stepfs.errors import AbsentError, RefusedError, UsageError

STAGES = parse(DOCKERFILE.read_text())
IGNORED = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()


def packages(stage: Stage) -> set[str]:
    (install,) = [s.command for s in stage.steps if isinstance(s, Run) and "apt-get install" in s.command]
    words = install.partition("apt-get install")[2].partition("&&")[0].split()
    return {word for word in words if not word.startswith("-")}


def test_the_image_is_slim_has_a_numbered_user_and_starts_stepfs_under_an_init():
    build, final = STAGES
    assert build.suite == final.suite
    assert final.user == "10001:10001"
    assert final.entrypoint == ["/usr/bin/tini", "--", "stepfs"]
    assert packages(final) == {"fuse3", "python3", "tini"}
    assert final.variables["PATH"].startswith("/opt/stepfs/bin:")
    assert final.labels["org.opencontainers.image.version"] == __version__


def test_it_holds_the_wheel_of_this_version_with_the_pinned_dependencies():
    build, final = STAGES
    (brought,) = [step for step in build.steps if isinstance(step, Copy)]
    wheel = f"stepfs-{__version__}-py3-none-any.whl"
    assert brought == Copy(("constraints.lock.txt", f"dist/{wheel}"), "/wheel/")
    (installed,) = [s.command for s in build.steps if isinstance(s, Run) and "pip install" in s.command]
    assert "-c /wheel/constraints.lock.txt" in installed
    assert installed.endswith(f"/wheel/{wheel}")
    assert Copy(("/opt/stepfs",), "/opt/stepfs", "build") in final.steps


def test_it_is_built_with_the_packages_that_the_readme_names():
    asked = {word for word in install_lines()[0].split()[2:] if not word.startswith("-")}
    assert packages(STAGES[0]) | {"fuse3"} == asked | {"python3"}


def test_the_build_sees_nothing_else_of_a_checkout():
    assert [line for line in IGNORED if line and not line.startswith("#")] == [
        "*",
        "!constraints.lock.txt",
        "!dist/stepfs-*.whl",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "FROM python:3.13-slim", "FROM debian:trixie", "FROM debian:trixie-slim as build", "ADD https://x /x",
        "RUN a && \\", "COPY --chown=1:1 a /a", "COPY a", "USER stepfs", "USER 10001", "ENV A=$PATH", "ENV A 1",
        "ENTRYPOINT tini stepfs", "ARG VERSION", "VOLUME /data", "HEALTHCHECK NONE", 'SHELL ["bash"]',
    ],
)  # fmt: skip
def test_what_only_docker_would_understand_is_refused(line):
    head = "" if line.startswith("FROM") else "FROM debian:trixie-slim\n"
    with pytest.raises(UsageError, match=r"Dockerfile:\d: scripts/image does not understand"):
        parse(f"{head}{line}\n")


def test_the_oci_image_is_configured_as_the_dockerfile_says(tmp_path, monkeypatch):
    stand_in = tmp_path / "bin/umoci"
    stand_in.parent.mkdir()
    stand_in.write_text(
        '#!/bin/sh\nfor word; do echo "$word" >>"$CALLS"; done\n[ "$1" != init ] || mkdir "$3"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "image").mkdir()
    (tmp_path / "image/old").touch()
    write_layout(tmp_path / "root", STAGES[-1], tmp_path / "image", "1.2.3")
    assert not list((tmp_path / "image").iterdir()), "the old image is gone"
    options = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("--config")]
    text = DOCKERFILE.read_text()
    for instruction, option in {"USER": "user", "WORKDIR": "workingdir"}.items():
        (value,) = re.findall(rf"^{instruction} (.+)$", text, re.MULTILINE)
        assert f"--config.{option}={value}" in options
    for instruction, option in {"ENV": "env", "LABEL": "label"}.items():
        for value in re.findall(rf"^{instruction} (.+)$", text, re.MULTILINE):
            assert f"--config.{option}={value}" in options
    words = [option.partition("=")[2] for option in options if option.startswith("--config.entrypoint")]
    assert words == STAGES[-1].entrypoint


def test_settings_of_pip_hold_inside_and_their_files_are_brought(tmp_path, monkeypatch):
    certificate, wheels = tmp_path / "ca.crt", tmp_path / "wheels"
    certificate.touch()
    wheels.mkdir()
    (tmp_path / "own/simple").mkdir(parents=True)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(
        f"[global]\ncert = {certificate}\nfind-links = {wheels} file://{tmp_path}/absent\n"
        f"extra-index-url = file://{tmp_path}/own/simple\n"
        "index-url = https://index.example/simple/\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_TIMEOUT", "7")
    found = network.of_this_machine()
    assert found.paths == (str(certificate), str(tmp_path / "own"), str(wheels))
    assert "PIP_CONFIG_FILE" not in found.variables
    assert found.variables["PIP_CERT"] == f"/mnt{certificate}"
    assert found.variables["PIP_FIND_LINKS"] == f"/mnt{wheels} file:///mnt{tmp_path}/absent"
    assert found.variables["PIP_INDEX_URL"] == "https://index.example/simple/"
    assert found.variables["PIP_TIMEOUT"] == "7"


def test_what_is_missing_is_said_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RefusedError, match="run scripts/image with sudo, or docker build"):
        make_image(tmp_path, tmp_path / "image")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="apt-get install debootstrap umoci"):
        make_image(tmp_path, tmp_path / "image")
    stand_ins = ("debootstrap", "umoci", "unshare")
    for name in stand_ins:
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "constraints.lock.txt").touch()
    with pytest.raises(AbsentError, match=r"stepfs-.*\.whl does not exist; run scripts/release first"):
        make_image(tmp_path, tmp_path / "image")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*stand_ins, "constraints.lock.txt"])
