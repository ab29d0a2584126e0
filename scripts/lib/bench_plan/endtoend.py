"""A whole job: 8 ranks that read planned steps on a mount, beside 8 DataLoaders that draw the same records at random.

Compute is virtual: a rank's micro-batch takes its cost, of every segment that its attention sees, padding included, and
ranks wait for the slowest one at each micro-batch, as sharded parameters make them. So time is a sum of maxima, and the
machine's own speed is not in it. What is real: records, plan, run, lake, mount, files, loaders. Data never keeps a rank
waiting, on either side.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.utils.data import DataLoader, DistributedSampler

from bench.machine import BIN, let_go
from bench.machine import run as run_command
from bench.report import Report, at_least
from bench_plan.lengths import Integers, lognormal

RANKS, MICRO = 8, 8
PLAN = """\
version: 1
output: {{ext: .safetensors, mesh: "dp=8", sequence_length: {length}, micro_batches: {micro}{columns}}}
tokenizer: {{kind: bytes}}
sources: {{s: {{format: jsonl, files: s.jsonl, epochs: 1{transform}}}}}
cost: {{{cost}}}
balance: {{{balance}}}
until: {{steps: {steps}}}
"""
SAMPLE = """\
import numpy

def sample(record):  # a patch is one byte: how large it is has no part in its cost
    return {"text": record["text"], "columns": {"pixels": numpy.zeros((record["patches"], 1), numpy.uint8)}}
"""
Figures = NDArray[np.float64]
PRICE = 8000  # of a patch of the encoder, beside 6 × 4096 of a token of the backbone
PATCHES_A_TOKEN = 4
PATCHES_MAX = 4096  # of an image, as plans have it by default


@dataclass(frozen=True)
class Job:
    """A model, and what it trains on."""

    name: str
    length: int  # of a row, which is a micro-batch
    linear: int
    quadratic: int
    bound: float  # of the gain
    images: bool = False

    def plan(self, steps: int) -> str:
        """It is told the model's cost."""
        prices = f", columns: {{pixels: {PRICE}}}" if self.images else ""
        return PLAN.format(
            length=self.length,
            micro=MICRO,
            steps=steps,
            columns=", columns: {pixels: {dtype: uint8, shape: [1]}}" if self.images else "",
            transform=', transform: "sample:sample"' if self.images else "",
            cost=f"linear: {self.linear}, quadratic: {self.quadratic}{prices}",
            balance="loads: [tokens, pixels], over: micro_batches" if self.images else "over: micro_batches",
        )

    def backbone(self, segments: NDArray[Any]) -> float:
        """Of segments of so many tokens."""
        return float(self.linear * segments.sum() + self.quadratic * (segments.astype(np.float64) ** 2).sum())


JOBS = (
    Job("7B, rows of 16k", 16384, 6 * 4096, 1, 1.1),
    Job("quadratic, rows of 16k", 16384, 0, 1, 2),
    Job("text and images, 7B, rows of 4k", 4096, 6 * 4096, 1, 1.3, images=True),
    Job("text and images, 7B, rows of 8k", 8192, 6 * 4096, 1, 1.3, images=True),
)


def run(report: Report, *, quick: bool) -> None:
    steps = 2 if quick else 10
    for job in JOBS:
        tokens, patches = documents(job, steps)
        with tempfile.TemporaryDirectory(prefix="stepfs-bench-plan-") as name:
            ours = rate(planned(job, Path(name), tokens, patches, steps))
        theirs = rate(drawn(job, tokens, patches, steps))
        cut = rate(drawn(job, tokens, patches, steps, cut=True))
        sides = {"planned": ours, "drawn": theirs, "cut": cut}
        report.figures.setdefault("endtoend", {})[job.name] = {"steps": steps, **sides}
        what = f"{job.name}, {steps} steps: tokens per time of compute, against documents drawn at random"
        beside = "" if job.images else f", {ours[0] / cut[0]:.2f} against documents cut at rows' ends"
        once = f"{ours[1] / theirs[1]:.2f} where ranks meet once a step{beside}"
        report.add(at_least(job.bound, what, f"{ours[0] / theirs[0]:.2f}", once, ours[0] / theirs[0]))


def documents(job: Job, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and patches of each: some more than so many steps hold."""
    room = RANKS * MICRO * job.length * (steps + 2)
    if job.images:
        tokens, patches = records(room // 500)
    else:
        tokens = lognormal(7, room // 500)
        patches = np.zeros_like(tokens)
    count = int(np.searchsorted(np.cumsum(tokens + 1), room))
    return tokens[:count], patches[:count]


def planned(
    job: Job, directory: Path, tokens: NDArray[np.int64], patches: NDArray[np.int64], steps: int
) -> Iterator[tuple[int, Figures]]:
    """Tokens of each step, and cost by load, rank and micro-batch, from the files that a mount shows."""
    lines = (
        json.dumps({"text": "x" * length, "patches": rows}) + "\n"
        for length, rows in zip(tokens.tolist(), patches.tolist(), strict=True)
    )
    (directory / "s.jsonl").write_text("".join(lines))
    (directory / "sample.py").write_text(SAMPLE)
    (directory / "plan.yaml").write_text(job.plan(steps))
    lake, mount = f"file://{directory}/lake", directory / "mount"
    mount.mkdir()
    run_command([str(BIN / "stepfs-produce"), "run", str(directory / "plan.yaml"), lake])
    run_command([str(BIN / "stepfs"), "mount", lake, str(mount)])
    try:
        loaders = [DataLoader(Files(mount, rank, steps), batch_size=None) for rank in range(RANKS)]
        for files in zip(*loaders, strict=True):
            cost = np.array([costs_of(job, file) for file in files])
            yield sum(int(file["spans"][:, 2].sum()) for file in files), cost.transpose(2, 0, 1)
    finally:
        let_go(mount)


class Files:
    """A rank's file of each step."""

    def __init__(self, mount: Path, rank: int, steps: int) -> None:
        self._paths = [mount / f"step-{step:09d}/rank-{rank:05d}.safetensors" for step in range(steps)]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, step: int) -> dict[str, Any]:
        return load_file(self._paths[step])


def costs_of(job: Job, file: dict[str, Any]) -> list[list[float]]:
    """Backbone and encoder of each micro-batch."""
    ends, offsets = file["cu_seqlens"].numpy(), file["cu_seqlens_offsets"].tolist()
    micros = file["spans"][:, 0].numpy()
    rows = file["pixels_counts"].numpy() if job.images else np.zeros(len(micros), np.int64)
    return [
        [
            job.backbone(np.diff(ends[offsets[micro] : offsets[micro + 1]])),
            PRICE * float(rows[micros == micro].sum()),
        ]
        for micro in range(MICRO)
    ]


def drawn(
    job: Job, tokens: NDArray[np.int64], patches: NDArray[np.int64], steps: int, *, cut: bool = False
) -> Iterator[tuple[int, Figures]]:
    """The same of ranks that draw documents by torch's sampler, and fill rows with them as they come."""
    both = np.stack([tokens + 1, patches], axis=1).tolist()  # a document's end is a token
    samplers = (DistributedSampler(both, RANKS, rank, seed=1) for rank in range(RANKS))
    ranks = [
        rows_of(job, cut, iter(DataLoader(both, batch_size=None, sampler=sampler, collate_fn=list)))
        for sampler in samplers
    ]
    for _ in range(steps):
        found = [[next(rank) for _ in range(MICRO)] for rank in ranks]
        cost = np.array([[(backbone, encoder) for _, backbone, encoder in rank] for rank in found])
        yield sum(count for rank in found for count, _, _ in rank), cost.transpose(2, 0, 1)


def rows_of(job: Job, cut: bool, documents: Iterator[Sequence[int]]) -> Iterator[tuple[int, float, float]]:
    """Tokens, backbone and encoder of row after row. A row ends with padding before the document that does not fit, or
    this is cut there; one that is longer than a row is cut all the same, as plans do.
    """
    row: list[int] = []
    encoder = 0.0
    for length, rows in documents:
        while length > (left := job.length - sum(row)):
            taken = left if cut or not row else 0
            yield sum(row) + taken, job.backbone(np.array([*row, left])), encoder
            row, encoder, length = [], 0.0, length - taken  # noqa: PLW2901
        row.append(length)
        encoder += PRICE * rows


def rate(steps: Iterator[tuple[int, Figures]]) -> tuple[float, float]:
    """Tokens per time: of ranks that meet at every micro-batch, and once a step. At each, encoder and backbone apart."""
    tokens, met, once = 0, 0.0, 0.0
    for count, cost in steps:
        tokens += count
        met += float(cost.max(axis=1).sum())
        once += float(cost.sum(axis=2).max(axis=1).sum())
    return tokens / met, tokens / once


def records(count: int) -> tuple[Integers, Integers]:
    """Tokens and patches: half of the documents have an image of a lognormal size, in front of their text."""
    draw = np.random.default_rng(5)
    text = np.exp(draw.normal(6, 1.2, count)).astype(np.int64) + 1
    images = (np.exp(draw.normal(7, 0.9, count)) * (draw.random(count) < 0.5)).astype(np.int64)
    patches = np.minimum(images, PATCHES_MAX) // PATCHES_A_TOKEN * PATCHES_A_TOKEN
    return np.minimum(text, 4000) + patches // PATCHES_A_TOKEN, patches
