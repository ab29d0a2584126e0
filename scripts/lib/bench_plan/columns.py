"""What columns cost: decoding images, and carrying 20 MB of patches from the groups of a source to files."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from bench.report import Report, Row
from stepfs_producer.payloads.files import construct
from stepfs_producer.payloads.step import (
    NO_TOKEN,
    ColumnSpec,
    PayloadSpec,
    StepTask,
    columns_of,
)
from stepfs_producer.plan.sources import Column, Images
from stepfs_producer.transforms.images import with_images

RANKS, SPANS, TOKENS = 8, 64, 512
ROWS = 20_000_000 // 588 // SPANS


def run(report: Report, _directory: Path, *, quick: bool) -> None:
    size = 512
    noise = Image.effect_noise((size, size), 40).convert("RGB")
    file = io.BytesIO()
    noise.save(file, "JPEG")
    spec = Images(fields=("jpg",))
    ours = best_ms(lambda: with_images({"jpg": file.getvalue()}, spec), quick=quick)
    bare = best_ms(lambda: Image.open(io.BytesIO(file.getvalue())).convert("RGB").load(), quick=quick)
    report.add(
        Row(
            f"a JPEG of {size} × {size} pixels → patches, ms of CPU",
            f"{ours:.1f}",
            f"decoding alone {bare:.1f}",
            None,
        )
    )
    for own in (False, True):
        column = ColumnSpec("pixels", Column(dtype="uint8", shape=(588,), file="own" if own else "rank"))
        rows = [{"pixels": np.full((ROWS, 588), span, np.uint8)} for span in range(SPANS)]
        [held] = columns_of((column,), rows)
        order = np.random.default_rng(0).permutation(SPANS)
        task = step()
        gather = best_ms(partial(held.take, order), quick=quick)
        whole = StepTask(*task, (held.take(order),))
        payloads = PayloadSpec(".safetensors", True, 0, 1 << 17, columns=(column,))
        plain = PayloadSpec(".safetensors", True, 0, 1 << 17)
        make = best_ms(partial(construct, payloads, whole), quick=quick)
        without = best_ms(partial(construct, plain, StepTask(*task)), quick=quick)
        files, _ = construct(payloads, whole)
        what = f"20 MB of patches {'into files beside' if own else 'into the files'}, ms of CPU: gathered, written"
        report.add(Row(what, f"{gather:.0f}, {make:.0f}", f"the same tokens alone {without:.0f}", None))
        if own:
            read = sum(map(len, files[::2])) / sum(map(len, files))
            report.add(Row("bytes that a stage without the encoder reads", f"{read:.2%}", "of the step's", None))


def step() -> tuple[
    tuple[int, int, int], int, tuple[str, ...], np.ndarray, np.ndarray, np.ndarray, None, None
]:  # fmt: skip
    rows = SPANS // RANKS
    spans = np.zeros((SPANS, 10), np.int64)
    spans[:, 0], spans[:, 2] = np.divmod(np.arange(SPANS), rows)
    spans[:, 4] = TOKENS
    ids = np.arange(SPANS * TOKENS, dtype=np.int32)
    following = np.full(SPANS, NO_TOKEN, np.int32)
    return (RANKS, 1, rows), TOKENS, ("s",), spans, ids, following, None, None


def best_ms(work: Callable[[], object], *, quick: bool) -> float:
    best = float("inf")
    for _ in range(3 if quick else 15):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return 1000 * best
