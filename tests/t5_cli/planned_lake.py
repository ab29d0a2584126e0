"""A small planned lake for tests to spoil, and its commands that ask for its past."""

from __future__ import annotations

import json
from pathlib import Path

from lakes import Ended, produce

PLAN = """\
version: 1
output: {ext: EXT, mesh: "dp=2", sequence_length: 128, micro_batch_tokens: 256, micro_batches: 2}
sources:
  code:  {format: jsonl, files: code/}
  prose: {format: text, records: lines, files: prose.txt}
mix: {code: 30, prose: 70}
"""
ONE_PLAN_STEPS = 12


def write_plan(directory: Path, ext: str = ".safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "code").mkdir()
    lines = [json.dumps({"text": f"code {number} " + "x" * (number * 37 % 90)}) for number in range(300)]
    (directory / "code/0.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "prose.txt").write_text(
        "".join(f"prose {number} " + "y" * (number * 31 % 320) + "\n" for number in range(700))
    )
    path = directory / "plan.yaml"
    path.write_text(PLAN.replace("EXT", ext))
    return path


def made(
    directory: Path, *, ext: str = ".safetensors", steps: int = ONE_PLAN_STEPS, more: tuple[object, ...] = ()
) -> str:
    plan = directory / "plan.yaml"
    if not plan.exists():
        write_plan(directory, ext)
    url = f"file://{directory}/lake"
    done = produce("run", plan, url, "--limit-steps", steps, "--workers", 1, *more)
    assert done.code == 0, done.err
    return url


def lake_of(directory: Path) -> str:
    return f"file://{directory}/lake"


def replayed(directory: Path, *arguments: object, steps: str = f"0:{ONE_PLAN_STEPS}") -> Ended:
    words = ["--steps", steps, "--plan-dir", directory, "--workers", 1, *arguments]
    return produce("replay", lake_of(directory), *words)


def spans(directory: Path, *arguments: object) -> list[dict[str, object]]:
    return produce("lineage", lake_of(directory), *arguments, "--json").document["spans"]


def one_line(ended: Ended, code: int, words: str) -> None:
    assert (ended.code, ended.err.count("\n")) == (code, 1), ended.err
    assert words in ended.err


def behind_the_head(path: Path) -> bytes:
    """Every `y` behind the 64 KiB that a listing knows is another letter."""
    data = path.read_bytes()
    return data[: 64 << 10] + data[64 << 10 :].replace(b"y", b"z")


def texts(directory: Path, step: int) -> list[dict[str, str | None]]:
    return spans(directory, "--step", step, "--text", "--plan-dir", directory)  # type: ignore[return-value]
