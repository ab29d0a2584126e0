"""Columns through whole runs: images in Parquet, files of micro-batches, readers of other meshes, other extensions."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from committed import committed
from lakes import stepfs
from PIL import Image
from planned_lake import one_line, produce, write_plan

from stepfs import Lake, StepDataset

pytestmark = pytest.mark.timeout(600)  # a run takes seconds, and minutes beside many others

PLAN = """\
version: 1
output:
  ext: EXT
  mesh: "dp=2"
  micro_batches: 2
  sequence_length: 128
  columns: {pixels: {dtype: uint8, shape: [588]}, weight: {dtype: float32, shape: []}}
sources:
  pictures: {format: parquet, files: a.parquet, transform: "seen:sample", images: {fields: image, merge: 1}, epochs: 1}
until: {steps: 3}
"""
CODE = """\
import numpy as np

def sample(record):
    image = record["image"]
    if image is None:
        return {"text": record["text"]}
    weight = np.full(1, len(image.pixels), np.float32)
    return {"text": record["text"], "columns": {"pixels": image.pixels, "weight": weight}}
"""


@pytest.fixture
def plan(tmp_path):
    """Rows as Hugging Face's datasets keep them: {bytes, path} of an image, or none, and a text."""
    rows = []
    for number in range(120):
        file = io.BytesIO()
        Image.new("RGB", (14 * (1 + number % 4), 14), (number, 0, 0)).save(file, "PNG")
        image = {"bytes": file.getvalue(), "path": f"{number}.png"} if number % 3 else None
        rows.append({"image": image, "text": f"{number:03d} " + "x" * (number % 50)})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "seen.py").write_text(CODE)

    def write(ext: str, **changes: str) -> Path:
        text = PLAN.replace("EXT", ext)
        for old, new in changes.items():
            text = text.replace(f"{old}:", f"{new}:")
        (tmp_path / "plan.yaml").write_text(text)
        return tmp_path / "plan.yaml"

    return write


def numbers_of(batch: dict) -> dict[int, int]:
    """The document of each span → its patches, which all must have its shade."""
    found = {}
    rows = np.split(batch["pixels"], np.cumsum(batch["pixels_counts"])[:-1])
    for (micro, start, tokens, *_), patches in zip(batch["spans"].tolist(), rows, strict=True):
        text = bytes(batch["input_ids"][micro, start : start + tokens].astype(np.uint8)).decode(errors="ignore")
        number = int(text[:3])
        assert (patches[:, ::3] == number).all()
        assert len(patches) == (1 + number % 4 if number % 3 else 0)
        found[number] = len(patches)
    return found


def as_arrays(batch: dict) -> dict:
    return {name: value.numpy() for name, value in batch.items() if isinstance(value, torch.Tensor)}


def test_files_of_ranks_are_split_for_other_meshes_as_files_of_micro_batches_are(plan, tmp_path) -> None:
    lakes = {}
    for files in ("ranks", "micro_batches"):
        path = plan(".safetensors", micro_batches=f"files: {files}\n  micro_batches")
        lakes[files] = f"file://{tmp_path}/{files}"
        done = produce("run", path, lakes[files], "--workers", 1)
        assert done.code == 0, done.err
    seen: dict[int, int] = {}
    for rank in range(4):
        readers = [StepDataset(lake, rank=rank, mesh="dp=4", start=0, stop=3) for lake in lakes.values()]
        parts = [[reader[step] for step in range(3)] for reader in readers]
        for one, other in zip(*parts, strict=True):
            [left], [right] = one, other
            mine, theirs = as_arrays(left), as_arrays(right)
            assert {name: array.tolist() for name, array in mine.items()} == {
                name: array.tolist() for name, array in theirs.items()
            }
            seen |= numbers_of(mine)
            assert mine["weight"].tolist() == [count for count in mine["pixels_counts"].tolist() if count]
    assert len(seen) > 40


def test_a_tar_lake_holds_them_and_its_lake_refuses_another_column(plan, tmp_path) -> None:
    lake = f"file://{tmp_path}/lake"
    assert produce("run", plan(".tar"), lake, "--workers", 1).code == 0
    [(_, payloads), *_] = committed(lake)
    with tarfile.open(fileobj=io.BytesIO(payloads[0])) as archive:
        endings = {name.split(".", 1)[1] for name in archive.getnames()}
    assert {"pixels.npy", "pixels_counts.npy", "weight.npy", "weight_counts.npy", "json"} <= endings
    other = f"file://{tmp_path}/other"
    assert produce("run", plan(".safetensors"), other, "--workers", 1).code == 0
    path = plan(".safetensors", weight="heaviness")
    (tmp_path / "seen.py").write_text(CODE.replace('"weight"', '"heaviness"'))
    says = "producer plan has made files with the columns"
    for command, *options in (
        ("run", "--producer-id", "b"),
        ("check", "--accept-changes"),
        ("run", "--accept-changes"),
    ):
        one_line(produce(command, path, other, *options), 4, says)
    producers = stepfs("status", other, "--json").document["producers"]
    assert {name: one["epoch"] for name, one in producers.items()} == {"plan": 1}, "no epoch was taken"


def test_files_of_micro_batches_are_the_parts_of_the_ranks_files(tmp_path: Path, file_url: str) -> None:
    plan = write_plan(tmp_path, ".npy")
    text = plan.read_text()
    found = {}
    for files in ("ranks", "micro_batches"):
        plan.write_text(text.replace("micro_batches: 2", f"micro_batches: 4, files: {files}"))
        lake = f"{file_url}-{files}"
        for limit in (2, 5):  # and goes on
            assert produce("run", plan, lake, "--workers", 1, "--limit-steps", limit).code == 0
        found[files] = [
            np.concatenate([np.load(io.BytesIO(payload)) for payload in step], axis=1) for _, step in committed(lake)
        ]
        with Lake(lake) as reader:
            assert (reader.world, reader.micro_batches) == (2, 1 if files == "ranks" else 4)
    assert all(map(np.array_equal, found["ranks"], found["micro_batches"]))
    assert len(found["ranks"]) == 5
