"""What every benchmark ends in: a table on the terminal, the figures as JSON; and where they were taken.

A row states what was measured, the figure, what it is measured against in the same run, their ratio and the target.
A row without a target is there to be read beside the others (the store's own bandwidth, the machine's limits).
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[3]
_PIPE_WIDTH = 1000  # more than any table needs


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `held` is None where there is nothing to hold."""

    what: str
    ours: str
    against: str = ""
    ratio: float | None = None
    target: str = ""
    held: bool | None = None


def at_most(bound: float, what: str, ours: str, against: str, ratio: float, unit: str = "×") -> Row:
    """A row whose ratio (or figure) must not exceed a bound."""
    return Row(what, ours, against, ratio, f"≤ {bound:g} {unit}".rstrip(), ratio <= bound)


def at_least(bound: float, what: str, ours: str, against: str, ratio: float, unit: str = "×") -> Row:
    """A row whose ratio must reach a bound."""
    return Row(what, ours, against, ratio, f"≥ {bound:g} {unit}".rstrip(), ratio >= bound)


class Report:
    """Collects rows and raw figures while a benchmark runs."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.rows: list[Row] = []
        self.figures: dict[str, Any] = {}
        self.console = Console(highlight=False, stderr=True)
        self._machine = machine()
        self._started_s = time.monotonic()

    def say(self, text: str) -> None:
        """Progress, on stderr."""
        self.console.print(f"[dim]{time.monotonic() - self._started_s:6.1f} s[/dim]  {text}")

    def add(self, *rows: Row) -> None:
        self.rows.extend(rows)
        for row in rows:
            self.say(f"{row.what}: {row.ours} {row.against and f'against {row.against}'} {_verdict(row)}")

    def finish(self, out: Path) -> None:
        """Print the table, write `<name>.json` into `out`."""
        after = load()
        document = {
            "benchmark": self.name,
            "machine": self._machine | {"load_after": after},
            "seconds": round(time.monotonic() - self._started_s, 1),
            "rows": [asdict(row) for row in self.rows],
            "figures": self.figures,
        }
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{self.name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console = _console()
        if self.rows:
            console.print(table(self.title, self.rows))
        facts = self._machine
        console.print(
            f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
            f"Python {facts['python']}, commit {facts['commit']}; load {facts['load']} before, {after} after"
        )
        if facts["pages_taken_back"]:
            console.print(
                "The kernel of this machine pages out what rests for seconds (DAMON): first touches are slow."
            )
        console.print(f"written: {out / self.name}.json", soft_wrap=True)


def table(title: str, rows: Sequence[Row]) -> Table:
    """Where it is too wide, the words are broken and not the figures that count."""
    made = Table(title=title, title_justify="left")
    for heading in ("measured", "ours", "against"):
        made.add_column(heading, overflow="fold")
    for heading in ("ratio", "target"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("", no_wrap=True)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        made.add_row(row.what, row.ours, row.against, ratio, row.target, _verdict(row))
    return made


def _console() -> Console:
    """A pipe has no width; a table that wraps cannot be pasted."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _verdict(row: Row) -> str:
    return {None: "", True: "[green]reached[/green]", False: "[bold red]MISSED[/bold red]"}[row.held]


def machine() -> dict[str, Any]:
    """Where the figures were taken: whoever compares two runs looks here first."""
    cpu = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], check=False, capture_output=True, text=True,
    )  # fmt: skip
    return {
        "cpu": cpu[0] if cpu else platform.processor(), "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30), "kernel": platform.release(), "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": load(), "pages_taken_back": _pages_taken_back(),
    }  # fmt: skip


def _pages_taken_back() -> bool:
    """Whether an agent of the (virtual) machine evicts pages that nobody used for a while, without any shortage."""
    for one in Path("/sys/kernel/mm/damon/admin/kdamonds").glob("[0-9]*"):
        schemes = one.glob("contexts/*/schemes/*/action")
        actions = [scheme.read_text(encoding="utf-8").strip() for scheme in schemes]
        if (one / "state").read_text(encoding="utf-8").strip() == "on" and "pageout" in actions:
            return True
    return False


def load() -> float:
    """Runnable processes over the last minute; above the number of cores everything measured here is slower."""
    return round(os.getloadavg()[0], 1)


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """How much of the machine was in use between two readings of `cpu_ticks`, whoever used it."""
    total, idle = after[0] - before[0], after[1] - before[1]
    return 1 - idle / total if total else 0.0


def cpu_ticks() -> tuple[int, int]:
    """(all, idle) ticks of all cores since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3] + fields[4]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed; NaN if there are none."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


def median(values: Sequence[float]) -> float:
    """NaN if there are none."""
    return statistics.median(values) if values else float("nan")
