"""A plan of two sources, and runs of it in this process."""

from __future__ import annotations

import json
from pathlib import Path

from lakes import Ended, produce

PLAN = """\
version: 1
output: {ext: .npy, mesh: "dp=2", sequence_length: 128, micro_batch_tokens: 512}
sources:
  code:  {format: jsonl, files: code/}
  prose: {format: text, records: lines, files: prose.txt}
mix: {code: 30, prose: 70}
"""


def plan_in(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    for part in range(2):
        lines = [json.dumps({"text": f"code {part} {number} " + "x" * (number * 37 % 90)}) for number in range(300)]
        (tmp_path / "code" / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "prose.txt").write_text(
        "".join(f"prose {number} " + "y" * (number * 31 % 120) + "\n" for number in range(700))
    )
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN)
    return path


def run(plan: Path, lake: str, *arguments: object) -> Ended:
    return produce("run", plan, lake, "--workers", 1, *arguments)
