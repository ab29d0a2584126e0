"""The three lines of OPERATIONS, "upgrade under a run", as they stand there: wheels of two versions, a DataLoader that reads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from finished import ran
from realmount import PATIENCE_S, clear, needs_resend

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "fs/OPERATIONS.md").read_text().partition("Upgrade under a run:\n")[2].split("\n\n")[0]
TRAINER = """
import os, sys, threading
from pathlib import Path
import torch.utils.data

root, expected = map(Path, sys.argv[1:])
names = [path.relative_to(expected) for path in sorted(expected.rglob("*.bin"))]

class Files(torch.utils.data.Dataset):
    def __len__(self): return len(names)
    def __getitem__(self, at):
        assert (root / names[at]).read_bytes() == (expected / names[at]).read_bytes(), names[at]
        return at

over = threading.Event()
threading.Thread(target=lambda: (os.read(0, 1), over.set()), daemon=True).start()
loader = torch.utils.data.DataLoader(Files(), num_workers=2, persistent_workers=True, shuffle=True)
epochs = 0
while not over.is_set():
    assert sorted(int(at) for at in loader) == list(range(len(names)))
    epochs += 1
    print(epochs, flush=True)
"""


def wheel(version, tmp_path, links):
    """Of this tree, with another version."""
    tree = tmp_path / version
    for name in ("fs", "producer", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        tree.mkdir(exist_ok=True)
        copy(ROOT / name, tree / name)
    for package in ("fs/stepfs", "producer/stepfs_producer"):
        init = tree / package / "__init__.py"
        init.write_text(re.sub('__version__ = ".*"', f'__version__ = "{version}"', init.read_text()))
    ran([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", links], cwd=tree, check=True)


def versions_of(directory):
    return set(re.findall('version="([^"]+)"', (directory / ".stepfs/metrics").read_text()))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@needs_resend
def test_the_three_lines_upgrade_a_mount_under_a_dataloader(steady, tmp_path, monkeypatch):
    links, installed, directory = tmp_path / "links", tmp_path / "installed", tmp_path / "m"
    directory.mkdir()
    for name, value in {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": links, "PIP_NO_DEPS": "1", "PIP_TARGET": installed, "PYTHONPATH": installed,
        "PATH": f"{installed}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}", "STEPFS_LOG_DIR": tmp_path / "logs",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))

    def run(line, *options):
        words = [{"LAKE": steady, "DIR": str(directory)}.get(word, word) for word in line.split()]
        done = ran([*words, *options], timeout=4 * PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    install, replace, _, status, *_ = re.findall("`([^`]+)`", LINES)
    wheel("9.0.1", tmp_path, links)
    run(install)
    run("stepfs mount LAKE DIR", "--ranks", "0-1")
    before = json.loads((directory / ".stepfs/config.json").read_text())
    assert versions_of(directory) == {"9.0.1"}
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, directory, tmp_path / "expected"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert trainer.stdout.readline() == "1\n"
        wheel("9.0.2", tmp_path, links)
        run(install)
        run(replace, "--ranks", "0-1")
        after = json.loads(run(status))
        assert (after["handovers"], after["follows"]) == (1, before["pid"])
        assert versions_of(directory) == {"9.0.2"}
        for _ in range(3):
            assert trainer.stdout.readline()
        said = trainer.communicate(timeout=PATIENCE_S)
        assert (trainer.returncode, said[1]) == (0, "")
        run("stepfs unmount DIR")
    finally:
        trainer.kill()
        trainer.communicate()
        clear(directory, None)
