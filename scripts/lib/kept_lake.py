"""Lakes, states and documents of this version, for every later one to read.

It is run once a release:

    .venv/bin/python scripts/lib/kept_lake.py         as root, with FUSE: tests/kept/VERSION.tar.xz

Lakes name each other by URL, so the archive is made and read in one place of the machine: `HERE`.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from PIL import Image
from pyarrow import parquet

import stepfs
from stepfs import Lake, ShuffledSteps, StreamState
from stepfs_producer import Producer

KEPT: Final = Path(__file__).parents[2] / "tests/kept"
HERE: Final = Path("/tmp/stepfs-kept")
STEPS, FIRST, FORKED = 50, 20, range(35, 37)
PLAN: Final = """\
version: 1
output:
  mesh: "dp=2"
  sequence_length: 128
  micro_batch_tokens: 256
  columns: {pixels: {dtype: uint8, shape: [588]}, grid: {dtype: int32, shape: [3]}}
sources:
  answers: {format: jsonl, files: answers.jsonl, pair: {prompt: prompt, chosen: good, rejected: bad}}
  pictures: {format: parquet, files: pictures.parquet, images: picture, transform: "pictures:sample"}
  prose: {format: text, records: lines, files: prose.txt}
mix: {answers: 30, pictures: 20, prose: 50}
"""
TRANSFORM: Final = """\
def sample(record):
    picture = record["picture"]
    return {"text": record["text"], "columns": {"pixels": picture.pixels, "grid": picture.grid}}
"""


def make() -> dict[str, Any]:
    """Everything below `HERE`; the manifest: what each lake holds, and the states that a trainer saved."""
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(parents=True)
    lakes = {name: f"file://{HERE}/{name}" for name in ("lake", "fork", "planned", "replica")}
    _by_hand(lakes["lake"])
    run("stepfs", "fork", lakes["lake"], lakes["fork"], "--skip", f"{FORKED.start}:{FORKED.stop}")
    with Producer(lakes["fork"], producer_id="tok-1") as producer:
        producer.append(payloads(100), position={"at": 100})
    _write_plan()
    run("stepfs-produce", "run", f"{HERE}/plan/plan.yaml", lakes["planned"], "--limit-steps", "8", "--workers", "1")
    run("stepfs", "replicate", lakes["planned"], lakes["replica"])
    return {
        "version": stepfs.__version__,
        "lakes": {name: {"url": url, "steps": contents(url)} for name, url in lakes.items()},
        "states": _states(lakes["lake"]),
        "volume": {
            "volume": "v",
            "attributes": {"lake": lakes["lake"], "ranks": "0-1", "memory": "1G"},
        },  # as csi/node.py keeps it
    }


def _by_hand(url: str) -> None:
    run("stepfs", "init", url, "--slices", "2", "--ext", ".bin")
    with Producer(url, producer_id="tok-0") as producer:
        for step in range(STEPS - 1):
            producer.append(payloads(step), position={"at": step}, note={"weights": step} if step % 2 else None)
    with Producer(url, producer_id="tok-1") as producer:
        producer.append(payloads(STEPS - 1), position={"at": STEPS - 1})
    run("stepfs", "checkpoint", url, str(FIRST), "--group", "run", "--new-group")
    run("stepfs", "checkpoint", url, "30", "--group", "run", "--keep", "2")
    run("stepfs", "checkpoint", url, "40", "--group", "trainer", "--pace", "--new-group")
    run("stepfs", "retire-producer", url, "tok-1")
    run("stepfs", "reclaim", url, "--grace", "0")


def payloads(step: int) -> list[bytes]:
    return [bytes([step % 256, rank]) * (20 + step % 7) for rank in range(2)]


def _write_plan() -> None:

    folder = HERE / "plan"
    folder.mkdir()
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "pictures.py").write_text(TRANSFORM)
    words = ["{}", "the answer is {}", "nobody knows {}", "look again at {}"]
    records = [
        {"prompt": f"what is {n}? ", "good": words[n % 4].format(n), "bad": words[(n + 1) % 4].format(n)}
        for n in range(60)
    ]
    (folder / "answers.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (folder / "prose.txt").write_text("".join(f"line {n} {'w' * (n % 50)}\n" for n in range(200)))
    pictures = []
    for number in range(30):
        file = io.BytesIO()
        Image.new("RGB", (28 * (1 + number % 3), 28), (number, 2 * number, 200)).save(file, "PNG")
        pictures.append({"text": f"picture {number}", "picture": file.getvalue()})
    parquet.write_table(pa.Table.from_pylist(pictures), folder / "pictures.parquet")


def _states(url: str) -> dict[str, Any]:
    """As a checkpoint keeps them; and what a mount says of itself, for programs of another version."""
    mount = HERE / "mnt"
    mount.mkdir()
    run("stepfs", "mount", url, str(mount), "--group", "run", "--ranks", "0")
    try:
        stream, order = StreamState.of_mount(mount), ShuffledSteps(mount, first=30, stop=STEPS, seed=7)
        stream.next_step = 33
        taken = [number for number, _ in zip(order, range(5), strict=False)]
        order.set_epoch(0, position=len(taken))
        told = {name: json.loads((mount / f".stepfs/{name}.json").read_text()) for name in ("config", "status")}
        return {"stream": stream.state_dict(), "order": order.state_dict(), "rest": [*order], **told}
    finally:
        run("stepfs", "unmount", str(mount))
        mount.rmdir()


def contents(url: str) -> dict[str, list[str]]:
    """Step → its slices, as base64 of small ones: no digest of ours says whether they are right."""
    with Lake(url, prefetch=0) as lake:
        steps = range(lake.first_step, lake.next_step)
        return {
            str(step): [base64.b64encode(bytes(lake[step][rank])).decode() for rank in range(lake.slices)]
            for step in steps
        }


def run(*words: str) -> None:
    command = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    subprocess.run(command, check=True, cwd=HERE, stdout=subprocess.DEVNULL)


def main() -> None:
    manifest = make()
    (HERE / "manifest.json").write_text(json.dumps(manifest))
    KEPT.mkdir(exist_ok=True)
    archive = KEPT / f"{stepfs.__version__}.tar.xz"
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(HERE, ".")
    shutil.rmtree(HERE)
    sys.stdout.write(f"{archive}: {archive.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
