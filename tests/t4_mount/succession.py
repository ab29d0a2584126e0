"""Daemons that follow one another: replaced, killed, or tampered with as they start."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path

from realmount import (
    PATIENCE_S,
    gone,
    stepfs,
    until,
)


def replace(mount, *options, timeout_s=PATIENCE_S):
    """Another daemon; `mount` is about that one from now on."""
    done = replaced(mount, *options, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    before, mount.pid = mount.pid, mount.config()["pid"]
    assert mount.config()["follows"] == before
    return before


def replaced(mount, *options, lake=None, timeout_s=PATIENCE_S):
    os.environ["STEPFS_LOG_DIR"] = str(mount.log.parent)
    try:
        lake = lake or mount.config()["lake"]
        return stepfs("mount", lake, mount.directory, "--replace", *options, timeout_s=timeout_s)
    finally:
        del os.environ["STEPFS_LOG_DIR"]


def kill(mount):
    """SIGKILL; `mount` is about the daemon that follows."""
    mount.kill(signal.SIGKILL)
    before, mount.pid = mount.pid, mount.config()["pid"]
    assert mount.config()["follows"] == before
    gone(before)
    until(lambda: f"after pid {before} that died" in mount.log.read_text(), "it does not get ready")


@contextmanager
def tampered(monkeypatch, tmp_path, code):
    """Every stepfs process that is started inside runs `code` first; `once()` in it is true in one of them alone."""
    (tmp_path / "tamper").mkdir(exist_ok=True)
    once = f"import os\ndef once(n=1):\n    for k in range(n):\n        try:\n            os.close(os.open({str(tmp_path)!r} + f'/once{{k}}', os.O_CREAT | os.O_EXCL)); return True\n        except FileExistsError: pass\n    return False\n"
    constants = Path(__file__).parents[1] / "support/changed_constants/sitecustomize.py"
    also = f"if 'TESTS_CONSTANTS' in os.environ:\n    import runpy\n    runpy.run_path({str(constants)!r})\n"
    (tmp_path / "tamper/sitecustomize.py").write_text(once + also + code)
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "tamper"), prepend=os.pathsep)
        yield


def keeper_follows(mount):
    """SIGKILL; `mount` is about the next keeper."""
    before = mount.keeper
    os.kill(before, signal.SIGKILL)
    until(lambda: mount.config()["keeper"] != before, "no other keeper")
    mount.keeper = mount.config()["keeper"]
