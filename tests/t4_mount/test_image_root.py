"""The root file system of the image, entered as a container runtime would enter it: as its user, under its init."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import tools

from image.__main__ import DOCKERFILE, make_image
from image.dockerfile import parse
from image.rootfs import entered
from release.build import build
from release_checks.wheel import readme_blocks
from stepfs import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
IMAGE = parse(DOCKERFILE.read_text())[-1]
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


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    work = tmp_path_factory.mktemp("image")
    (work / "dist").mkdir()
    shutil.copy(tools.ROOT / "constraints.lock.txt", work)
    build(tools.ROOT, "wheel", work / "dist", int(time.time()))
    make_image(work, work / "oci", rootfs=work / "root")
    (manifest,) = json.loads((work / "oci/index.json").read_text())["manifests"]
    assert manifest["annotations"]["org.opencontainers.image.ref.name"] == __version__
    yield work / "root"
    shutil.rmtree(work)


def start(
    root: Path, *command: str, devices=("fuse",), without: str = ""
) -> subprocess.CompletedProcess[str]:
    """The command as the image's user; `without`: a capability that the runtime does not give."""
    user, group = IMAGE.user.split(":")
    become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--inh-caps=-all"]
    become += [f"--bounding-set=-{without}"] if without else []
    variables = {**IMAGE.variables, "HOME": IMAGE.directory}
    inside = ["env", f"--chdir={IMAGE.directory}", *become, *command]
    return subprocess.run(
        entered(root, inside, variables=variables, devices=devices),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_the_entrypoint_is_stepfs_of_this_version(root):
    done = start(root, *IMAGE.entrypoint, "version", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["stepfs"] == __version__
    assert document["libfuse"]
    assert document["fusermount3"]
    assert start(root, *IMAGE.entrypoint, *IMAGE.command).stdout.startswith("Usage: stepfs")


def test_it_mounts_produces_reclaims_and_passes_doctor(root):
    tini, dashes, _ = IMAGE.entrypoint
    done = start(root, tini, dashes, "sh", "-c", USED)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert str(sum(range(8192))) in lines
    assert lines[-3:] == [f"step-00000000{step}" for step in (5, 6, 7)]


@pytest.mark.parametrize(
    ("devices", "without", "advice"),
    [((), "", "--device /dev/fuse"), (("fuse",), "sys_admin", "--cap-add SYS_ADMIN")],
    ids=["device", "capability"],
)
def test_without_device_or_capability_one_line_says_what_to_add(root, devices, without, advice):
    script = f'{INIT}\nmkdir -p run; exec stepfs mount "file://$PWD/counting" run'
    start(root, "rm", "-rf", "counting", "run")
    done = start(root, "sh", "-c", script, devices=devices, without=without)
    assert done.returncode == 4
    assert advice in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_it_holds_no_compiler_no_pip_and_no_trace_of_the_machine_that_made_it(root):
    for name in ("usr/bin/gcc", "opt/stepfs/bin/pip", "mnt", "var/lib/apt/lists", "wheel"):
        path = root / name
        assert not path.exists() or not list(path.iterdir()), name
    assert (root / "etc/resolv.conf").read_bytes() == b""
