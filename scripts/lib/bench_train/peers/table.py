"""The peers' rows as a table, as Markdown; and our targets beside the best of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from bench.report import Row, at_least, at_most
from bench_train.peers.judgement import Result

HEADINGS = (
    "peer",
    "samples/s",
    "stall",
    "fetched/sample",
    "CPU-s/1000",
    "PSS MiB",
    "first batch",
    "resume after kill -9",
    "other workers",
)
CLOSE = 0.05  # within it of the best is as good as the best


def cells(result: Result) -> list[str]:
    """One line; reasons stand where figures are missing."""
    resumed = result.resume
    if resumed:
        resumed += f", {result.resume_s:.2f} s" if result.resume_s is not None else ""
        resumed += "" if result.resumed_by == "state" else f" (by {result.resumed_by})"
    return [
        result.peer,
        _figure(result.samples_per_s, "{:,.0f}"),
        _figure(result.stall, "{:.1%}"),
        _figure(result.bytes_per_sample, "{:,.0f} B"),
        _figure(result.cpu_s_per_1000, "{:.2f}"),
        _figure(result.pss_mib, "{:,.0f}"),
        _figure(result.first_s, "{:.2f} s"),
        resumed or result.trouble,
        result.other_workers,
    ]


def _figure(value: float | None, text: str) -> str:
    return "–" if value is None or value != value else text.format(value)


def table(kind: str, results: Sequence[Result]) -> Table:
    found = Table(title=kind, title_justify="left")
    for heading in HEADINGS:
        found.add_column(heading, overflow="fold")
    for result in results:
        found.add_row(*cells(result))
    return found


def markdown(kind: str, results: Sequence[Result]) -> str:
    lines = [f"| {kind}: " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in cells(result)) + " |" for result in results]
    return "\n".join(lines) + "\n"


def verdicts(kind: str, results: Sequence[Result]) -> list[Row]:
    """A row per target and way of ours; the best may be ours itself, and then the ratio is 1."""
    rows = []
    for ours in (each for each in results if each.ours and each.samples_per_s is not None):
        rows += _verdicts(f"{kind}, {ours.peer}", ours, [each for each in results if each.samples_per_s])
    return rows


def _verdicts(what: str, ours: Result, results: Sequence[Result]) -> list[Row]:
    rows = []
    fast = max(results, key=lambda each: each.samples_per_s or 0)
    rows.append(
        at_least(
            1 - CLOSE,
            f"{what}: samples/s beside the best",
            f"{ours.samples_per_s or 0:,.0f}",
            f"{fast.peer} {fast.samples_per_s or 0:,.0f}",
            (ours.samples_per_s or 0) / (fast.samples_per_s or 1),
        )
    )
    idle = min(results, key=lambda each: each.stall if each.stall is not None else 1.0)
    rows.append(
        at_least(
            1 - CLOSE,
            f"{what}: share of time not stalled",
            f"{1 - (ours.stall or 0):.1%}",
            f"{idle.peer} {1 - (idle.stall or 0):.1%}",
            (1 - (ours.stall or 0)) / (1 - (idle.stall or 0)),
        )
    )
    lean = min(results, key=lambda each: each.bytes_per_sample or float("inf"))
    rows.append(
        at_most(
            1 + CLOSE,
            f"{what}: bytes per sample",
            f"{ours.bytes_per_sample or 0:,.0f}",
            f"{lean.peer} {lean.bytes_per_sample or 0:,.0f}",
            (ours.bytes_per_sample or 0) / (lean.bytes_per_sample or 1),
        )
    )
    exact = [each for each in results if each.resume_exact and each.resume_s]
    soon = min(exact, key=lambda each: each.resume_s or 0) if exact else ours
    ratio = (ours.resume_s or 0) / (soon.resume_s or 1) if ours.resume_exact else float("inf")
    rows.append(
        at_most(
            1 + CLOSE,
            f"{what}: first batch after an exact resume",
            f"{ours.resume}, {ours.resume_s or 0:.2f} s",
            f"{soon.peer} {soon.resume_s or 0:.2f} s",
            ratio,
        )
    )
    rows.append(
        Row(
            f"{what}: resume with another number of workers",
            ours.other_workers,
            "",
            None,
            "exact",
            ours.other_workers_exact,
        )
    )
    return rows
