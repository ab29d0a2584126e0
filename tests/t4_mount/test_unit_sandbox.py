"""The capabilities that `scripts/deploy/stepfs@.service` leaves to a daemon are enough for what it does."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from finished import ran
from realmount import STEPFS, clear, lake_with, stepfs

UNIT = Path(__file__).parents[2] / "scripts/deploy/stepfs@.service"
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a unit of the system's manager runs as root")


def kept() -> list[str]:
    (line,) = [li for li in UNIT.read_text().splitlines() if li.startswith("CapabilityBoundingSet=")]
    return [name.removeprefix("CAP_").lower() for name in line.partition("=")[2].split()]


def sandboxed(capabilities: list[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    bounds = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    taken = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={bounds}"]
    return ran([*taken, *STEPFS, *map(str, arguments)])


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A lake and a mount point in a directory of another user, closed for everybody else."""
    directory = tmp_path / "theirs"
    (directory / "mount").mkdir(parents=True)
    url = (directory / "lake").as_uri()
    batches = lake_with(url, 3)
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, 12345, 12345)
    directory.chmod(0o700)
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    yield url, directory / "mount", batches
    clear(directory / "mount", None)


def test_a_mount_serves_unmounts_and_records_under_the_units_capabilities(theirs, tmp_path):
    url, directory, batches = theirs
    cache = ["--cache-dir", tmp_path / "cache", "--cache-size", "8M"]
    done = sandboxed(kept(), "mount", url, directory, "--group", "run", *cache)
    assert done.returncode == 0, done.stderr
    config = json.loads((directory / ".stepfs/config.json").read_text())
    (bounding,) = [
        line.split()[1]
        for line in Path(f"/proc/{config['pid']}/status").read_text().splitlines()
        if line.startswith("CapBnd:")
    ]
    assert int(bounding, 16).bit_count() == len(kept())
    assert config["kernel"]["read_ahead_kb"] == 4096
    steps = sorted(directory.glob("step-*"))
    assert [[path.read_bytes() for path in sorted(step.iterdir())] for step in steps] == batches
    ended = sandboxed(kept(), "unmount", directory, "--checkpoint", "2")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(stepfs("status", url, "--json").stdout)["groups"]["run"]["need"] == 2


@pytest.mark.parametrize(
    ("missing", "line"), [("sys_admin", "--cap-add SYS_ADMIN"), ("dac_override", "Permission denied")]
)
def test_each_of_them_is_needed(theirs, missing, line):
    url, directory, _ = theirs
    left = [name for name in kept() if name != missing]
    done = sandboxed(left, "mount", url, directory, "--group", "run")
    assert done.returncode not in {0, 2}
    assert line in done.stderr
    said = [line for line in done.stderr.splitlines() if "new group 'run'" not in line]
    assert len(said) == 1
