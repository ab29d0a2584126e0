"""A plan whose files are micro-batches makes the parts of the files that it would make of ranks."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from committed import committed
from planned_lake import produce, write_plan

from stepfs import Lake


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
