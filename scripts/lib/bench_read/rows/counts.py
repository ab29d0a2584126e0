"""Bytes fetched per byte delivered, and requests per byte: counts, exact on any machine.

A node of r ranks reads its ranks' files of every step and nothing else, on lakes of 8, 64 and 512 slices; r goes from
1 to all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from bench.bed import Bed, Mount, blocks
from bench.machine import until
from bench.report import at_most

STEPS = 4


def counts(bed: Bed) -> None:
    """One row for the bytes, one for the requests; the worst case of each is named."""
    worst_bytes, worst_requests = (0.0, ""), (0.0, "")
    figures = []
    for slices in bed.plan.worlds:
        for size in bed.plan.slice_bytes:
            url = bed.lake("counts", slices, _batches(slices, size))
            for ranks in _nodes(slices):
                name = f"{ranks} of {slices} ranks, {size >> 10} KiB"
                fetched, delivered, requests, needed = _read(bed, url, slices, ranks)
                figures.append({"case": name, "fetched": fetched, "delivered": delivered, "requests": requests})
                worst_bytes = max(worst_bytes, (fetched / delivered, name))
                worst_requests = max(worst_requests, (requests / needed, name))
    bed.report.figures["counts"] = figures
    text = f"worst of {len(figures)} cases: {worst_bytes[1]}"
    bed.report.add(
        at_most(1.02, "bytes fetched / delivered", f"{worst_bytes[0]:.4f}", text, worst_bytes[0], ""),
        at_most(
            1,
            "requests / ⌈bytes / 8 MiB⌉",
            f"{worst_requests[0]:.2f}",
            worst_requests[1],
            worst_requests[0],
            "",
        ),
    )


def _batches(slices: int, size: int) -> Iterator[list[bytes]]:
    """Sizes vary as text does, and none is a multiple of a page."""
    draw = random.Random(slices)
    for _ in range(STEPS):
        yield [draw.randbytes(size + draw.randrange(1, size)) for _ in range(slices)]


def _nodes(slices: int) -> list[int]:
    """1, 2, 4 … all."""
    return [1 << power for power in range(slices.bit_length()) if 1 << power <= slices]


def _read(bed: Bed, url: str, slices: int, ranks: int) -> tuple[int, int, int, int]:
    """(bytes fetched, delivered, requests, ⌈bytes / 8 MiB⌉ summed over steps) of one node."""
    first = ranks if ranks * 2 <= slices else 0  # not the first node: others' slices lie on both sides
    mine = range(first, first + ranks)
    with bed.mounted(url, "--ranks", f"{mine[0]}-{mine[-1]}", "--prefetch", str(STEPS)) as mount:
        lengths = [[mount.path(step, rank).stat().st_size for rank in mine] for step in range(STEPS)]
        total = sum(map(sum, lengths))
        until(lambda: mount.data()["bytes_fetched"] >= total, 30)
        for step in range(STEPS):
            for rank, length in zip(mine, lengths[step], strict=True):
                assert len(mount.path(step, rank).read_bytes()) == length
        data = _settled(mount)
    return data["bytes_fetched"], total, data["requests"], sum(blocks(sum(step)) for step in lengths)


def _settled(mount: Mount) -> dict[str, int]:
    """The counters once nothing moves any more."""
    last: dict[str, int] = {}

    def same() -> bool:
        nonlocal last
        before, last = last, mount.data()
        return before == last

    until(same, 5)
    return last
