"""A fleet goes from one version to the next, and back, in the order of rule 41, on one S3 server under a trainer that reads.

Mounts and readers first, then reclaim and replicate, then producers, then what only the later one has. The later version is
this tree with edits that a release might make.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from realmount import PATIENCE_S, clear, needs_resend, until
from two_versions import LATER, NOW, shown, stale, version_of, write_trees

EDITS = {
    "format/codec": [
        (
            "KNOWN_NEEDS: Final[frozenset[str]] = frozenset()",
            'KNOWN_NEEDS: Final[frozenset[str]] = frozenset(("pins",))',
        )
    ],
    "mount/options": [("    metrics_address: Annotated[", "    metrics_at: Annotated[")],
    "mount/daemon/session": [("options.metrics_address", "options.metrics_at")],
}
PRODUCER = """
import sys, time
from pathlib import Path
from stepfs_producer import Producer
url, stop = sys.argv[1], Path(sys.argv[2])
with Producer(url, producer_id="tok") as producer:
    while not stop.exists():
        number = producer.next_seq
        producer.append([bytes([rank]) + number.to_bytes(8, "big") * 100 for rank in range(2)], position=number)
        producer.flush()
        print(number, flush=True)
        time.sleep(0.05)
"""
TRAINER = """
import sys
from pathlib import Path
root, stop = Path(sys.argv[1]), Path(sys.argv[2])
step = 0
while not stop.exists():
    for rank in range(2):
        data = (root / f"step-{step:09d}/rank-{rank:05d}.bin").read_bytes()
        assert data == bytes([rank]) + step.to_bytes(8, "big") * 100, step
    step += 1
    print(step, flush=True)
"""
READER = "import sys; from stepfs import Lake; lake = Lake(sys.argv[1]); print(lake.next_step, len(bytes(lake[lake.first_step][0])))"
TURNED_ON = """
import dataclasses, sys, trio
from stepfs.lake.control import Control
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store
async def main():
    store = open_store(sys.argv[1])
    control = Control(store, await open_lake(store))
    taken = False
    while not taken:
        await control.refresh()
        taken = await control.take(control.number + 1, dataclasses.replace(control.record, needs_of_writers=("pins",)))
    await store.aclose()
trio.run(main)
"""


class Versions:
    """Two trees, each run as if it alone were installed."""

    def __init__(self, tmp_path: Path) -> None:
        self.here = tmp_path
        write_trees(tmp_path, EDITS)

    def environment(self, version: str) -> dict[str, str]:
        tree = self.here / version
        paths = {
            "PYTHONPATH": f"{tree}/fs:{tree}/producer",
            "STEPFS_LOG_DIR": str(self.here / "logs"),
            "XDG_CACHE_HOME": str(self.here),
        }
        return {**os.environ, **paths, "PYTHONDONTWRITEBYTECODE": "1"}

    def __call__(self, version: str, *words: object, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            env=self.environment(version), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def stepfs(self, version: str, *words: object, code: int = 0) -> str:
        return self(version, "-m", "stepfs", *words, code=code)

    @contextmanager
    def running(self, version: str, program: str, *words: object) -> Iterator[subprocess.Popen[str]]:
        """It ends well once its last word, a file, is there; `on` waits until it has printed so many lines more."""
        stop = self.here / f"stop-{len(list(self.here.glob('stop-*')))}"
        command = [sys.executable, "-c", program, *map(str, words), str(stop)]
        with (
            (self.here / f"{stop.name}.log").open("w") as log,
            subprocess.Popen(
                command, env=self.environment(version), stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            try:
                yield process
                stop.touch()
                for _ in process.stdout or ():
                    pass
                assert process.wait(PATIENCE_S) == 0, (self.here / f"{stop.name}.log").read_text()
            finally:
                process.kill()


def on(process: subprocess.Popen[str], lines: int = 3) -> None:
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline(), "it has ended"


def test_each_edit_is_of_what_is_there():
    assert stale(EDITS) == []


@needs_resend
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_fleet_is_upgraded_and_goes_back_under_a_trainer(s3_url, tmp_path, request):
    run, old, new = Versions(tmp_path), NOW, LATER
    mount, copy = tmp_path / "m", f"{s3_url}-copy"
    mount.mkdir()
    request.addfinalizer(lambda: clear(mount, None))

    def serve_by(version: str) -> None:
        run.stepfs(version, "mount", s3_url, mount, "--replace")
        assert version_of(mount) == version

    def keep_by(version: str, trainer: subprocess.Popen[str]) -> None:
        on(trainer)
        next_step = shown(mount, "status")["last_step"]
        run.stepfs(version, "replicate", s3_url, copy)
        run.stepfs(version, "checkpoint", s3_url, next_step, "--group", "run", "--keep", "1")
        reclaimed = json.loads(run.stepfs(version, "reclaim", s3_url, "--grace", "0", "--json"))
        assert 0 < reclaimed["first_live_step"] <= next_step
        run.stepfs(version, "verify", copy)

    run.stepfs(old, "init", s3_url, "--slices", "2", "--ext", ".bin")
    run.stepfs(old, "mount", s3_url, mount, "--group", "run", "--wait", "60s")
    with run.running(old, TRAINER, mount) as trainer:
        with run.running(old, PRODUCER, s3_url) as producer:
            on(trainer)
            keep_by(old, trainer)
            serve_by(new)  # first mounts and readers
            on(trainer)
            run(new, "-c", READER, s3_url)
            keep_by(new, trainer)  # then reclaim and replicate
            on(producer)
        with run.running(new, PRODUCER, s3_url) as producer:  # then producers
            on(producer)
            on(trainer)
            keep_by(old, trainer)  # an operator's machine that was forgotten
        with run.running(old, PRODUCER, s3_url) as producer:  # and back, in the other order
            on(producer)
            on(trainer)
            keep_by(old, trainer)
            serve_by(old)
            on(trainer)
            run(old, "-c", READER, s3_url)
        serve_by(new)
        with run.running(new, PRODUCER, s3_url) as producer:
            on(producer)
            run(
                new, "-c", TURNED_ON, s3_url
            )  # last what only the later version has: older ones write no more, and read on
            for words in (
                ("checkpoint", s3_url, shown(mount, "status")["last_step"], "--group", "run"),
                ("reclaim", s3_url, "--grace", "0"),
                ("seal", s3_url),
            ):
                assert "needs pins, which this stepfs does not have; upgrade stepfs" in run.stepfs(old, *words, code=4)
            assert "needs pins" in run(old, "-c", PRODUCER, s3_url, tmp_path / "never", code=1)
            run(old, "-c", READER, s3_url)
            on(producer)
            on(trainer)
            keep_by(new, trainer)
        until(lambda: shown(mount, "status")["frontier"] > 0, "it follows")
        with run.running(
            new, PRODUCER, s3_url
        ):  # the trainer waits for a step, and must get one to see that it may end
            (tmp_path / "stop-0").touch()
            assert shown(mount, "status")["faults"] == 0
            for _ in trainer.stdout or ():
                pass
    run.stepfs(new, "unmount", mount)
