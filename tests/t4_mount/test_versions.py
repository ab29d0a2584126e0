"""Two versions side by side: a mount of one whose package becomes another one, by `pip install` in place, forth and back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from realmount import PATIENCE_S, clear, needs_resend, payload, until
from steady import SIZE
from two_versions import shown, stale, version_of, write_trees

pytestmark = [needs_resend, pytest.mark.usefixtures("real_daemons")]

# What a later version may change: file → (text, what is in its place).
OPTIONS, KEEPER, LAUNCH, STATE = "mount/options", "mount/keeper/process", "mount/launch", "mount/daemon/parts"
EDITS = {
    "the same messages": {},
    "an option more": {
        OPTIONS: [
            ("    deadline_s: float = DEADLINE_S\n", "    deadline_s: float = DEADLINE_S\n    cool: bool = False\n")
        ]
    },
    "an option renamed": {
        OPTIONS: [("    metrics_address: Annotated[", "    metrics_at: Annotated[")],
        "mount/daemon/session": [("options.metrics_address", "options.metrics_at")],
    },
    "a limit renamed": {KEEPER: [('"within_s"', '"window_s"')], LAUNCH: [('"within_s"', '"window_s"')]},
    "a message more": {
        "mount/keeper/messages": [("SPEAKS = (1, 1)", "SPEAKS = (1, 2)")],
        KEEPER: [
            ('"do": "know", **', '"do": "know", "more": 7, **'),
            ('"crashed": self.crashed, "deaths"', '"later": [1], "crashed": self.crashed, "deaths"'),
        ],
    },
    "what is shown is kept in another form": {
        STATE: [
            ('{"view": _values_of(view)}', '{"shown": [_values_of(view)]}'),
            ('decided.get("view")', '(decided.get("shown") or [None])[0]'),
        ]
    },
    "a module that is imported late": {
        "_internal/histogram": [("class Histogram", "BOUNDS = ()\n\n\nclass Histogram")],
        "mount/metrics": [
            (
                "from stepfs._internal.histogram import SECONDS, Histogram",
                "from stepfs._internal.histogram import BOUNDS, SECONDS, Histogram",
            )
        ],
    },
    "it must be understood": {
        "mount/daemon/session": [('"needs": [],', '"needs": ["files"],')],
        "mount/daemon/keeper_socket": [("frozenset[str]()", 'frozenset({"files"})')],
    },
    "other messages": {"mount/keeper/messages": [("SPEAKS = (1, 1)", "SPEAKS = (2, 2)")]},
}
ACTS = ("replace", "kill")
# Where the later one cannot be followed by the former, and where they do not understand each other at all.
REFUSED = {("it must be understood", "back"), ("other messages", "forth"), ("other messages", "back")}


class Installed:
    """A link to the tree of a version, as a package that is installed in place."""

    def __init__(self, tmp_path: Path, edits) -> None:
        self.here = tmp_path
        write_trees(tmp_path, edits)
        limits = '{"stepfs.mount.launch:PATIENCE_S": 8.0}'
        self.env = {
            **os.environ, "PYTHONPATH": f"{tmp_path}/now/fs:{tmp_path}/now/producer", "STEPFS_LOG_DIR": str(tmp_path / "logs"),
            "PYTHONDONTWRITEBYTECODE": "1", "TESTS_CONSTANTS": limits,
        }  # fmt: skip

    def install(self, version: str) -> None:
        fresh = self.here / "fresh"
        fresh.symlink_to(version)
        fresh.rename(self.here / "now")

    def stepfs(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stepfs", *map(str, words)]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_each_edit_is_of_what_is_there():
    assert [found for edits in EDITS.values() for found in stale(edits)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("way", ["forth", "back"])
@pytest.mark.parametrize(
    "edit",
    [
        *(pytest.param(one, marks=pytest.mark.nightly) for one in EDITS if one != "an option renamed"),
        "an option renamed",
    ],
)
def test_a_mount_goes_on_under_another_version(steady, tmp_path, request, edit, way, act):
    versions = Installed(tmp_path, EDITS[edit])
    before, after = ("0.1.0", "0.2.0") if way == "forth" else ("0.2.0", "0.1.0")
    refused, directory = (edit, way) in REFUSED, tmp_path / "m"
    directory.mkdir()
    request.addfinalizer(lambda: clear(directory, None))
    versions.install(before)
    done = versions.stepfs("mount", steady, directory, "--ranks", "0-1")
    assert done.returncode == 0, done.stderr
    first = shown(directory, "config")
    versions.install(after)
    with (directory / "step-000000002/rank-00001.bin").open("rb", buffering=0) as held:
        if act == "replace":
            done = versions.stepfs("mount", steady, directory, "--replace")
            assert (done.returncode, done.stderr.count("\n")) == ((4, 1) if refused else (0, 0)), done.stderr
        else:
            os.kill(first["pid"], signal.SIGKILL)
        if refused and act == "kill":  # nobody can serve it: readers get an error, and the next mount heals
            with pytest.raises(OSError, match=r"not connected|abort"):
                os.listdir(directory)
            return
        serves = shown(directory, "config")
        assert (serves["pid"] == first["pid"]) == refused
        assert serves["keeper"] == first["keeper"]
        assert version_of(directory) == (before if refused else after)
        assert held.read(1 << 20) == payload(2, 1, SIZE)
        assert (directory / "step-000000003/rank-00000.bin").read_bytes() == payload(3, 0, SIZE)
    if not refused and act == "kill":  # it answers before its keeper has heard so
        said, logs = f"after pid {first['pid']} that died", tmp_path / "logs"
        until(lambda: any(said in log.read_text() for log in logs.iterdir()), "it does not get ready")
    if not refused:  # and the keeper is of that version by now: a death, and back again
        os.kill(serves["pid"], signal.SIGKILL)
        assert shown(directory, "config")["follows"] == serves["pid"]
        assert shown(directory, "status")["faults"] == 0
        if (edit, "forth" if way == "back" else "back") not in REFUSED:
            versions.install(before)
            done = versions.stepfs("mount", steady, directory, "--replace")
            assert done.returncode == 0, done.stderr
            assert version_of(directory) == before
    keeper = first["keeper"]
    done = versions.stepfs("unmount", directory)
    if refused and edit == "other messages":
        return
    assert done.returncode == 0, done.stderr
    with suppress(FileNotFoundError):
        until(lambda: not Path(f"/proc/{keeper}").exists(), "its keeper is left")
