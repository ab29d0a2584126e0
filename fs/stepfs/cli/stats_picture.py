"""Bytes per hour and producer as a picture. matplotlib is no dependency of stepfs: it is imported here alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stepfs.cli.columns import printable
from stepfs.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from stepfs.cli.lake_stats import LakeStats

_PRODUCERS: Final = 8  # with a colour of their own
_HOURS_MAX: Final = 24 * 14  # the newest ones
_HOUR_S: Final = 3600
_HOURS_END: Final = 24 * 365 * 8000  # matplotlib's dates end with the year 9999
_OTHERS: Final = "others"


def require_matplotlib() -> None:
    """`UsageError` before a lake is read in vain."""
    if find_spec("matplotlib") is None:
        raise UsageError("--png needs the package matplotlib, which is not installed: pip install matplotlib")


def write_picture(stats: LakeStats, title: str, path: Path) -> None:
    """Stacked bars, one per hour. `RefusedError` if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    largest = sorted(stats.producers, key=lambda name: -stats.producers[name].payload_bytes)[:_PRODUCERS]
    hours, undated = hours_to_draw(stats)
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.xaxis_date()
    times = [hour / 24 for hour in hours]  # dates of matplotlib are days since 1970
    below = [0.0] * len(hours)
    for name in [*largest, *([_OTHERS] if len(stats.producers) > _PRODUCERS else [])]:
        rates = _rates(stats, hours, None if name == _OTHERS else name, set(largest))
        axes.bar(times, rates, bottom=below, width=1 / 24, align="edge", label=_label(name))
        below = [low + rate for low, rate in zip(below, rates, strict=True)]
    axes.set_ylabel("MB/s committed, mean of the hour")
    more = f" (without {undated} steps whose time no calendar has)" if undated else ""
    axes.set_title(_label(title) + more, fontsize="medium")
    axes.tick_params(axis="x", rotation=30)
    if stats.producers:
        figure.legend(loc="outside right upper", fontsize="small")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror or error}; name a file that can be written") from error


def hours_to_draw(stats: LakeStats) -> tuple[range, int]:
    """The newest hours; and how many steps have a time that a picture cannot show (a producer's clock was wrong)."""
    dated = [hour for hour, _ in stats.hours if 0 <= hour < _HOURS_END]
    last = max(dated, default=0)
    undated = sum(sums.steps for (hour, _), sums in stats.hours.items() if not 0 <= hour < _HOURS_END)
    return range(max(min(dated, default=0), last - _HOURS_MAX + 1), last + 1), undated


def _rates(stats: LakeStats, hours: range, name: str | None, shown: set[str]) -> list[float]:
    """MB/s by hour of one producer, or of all that are not shown (`name` None)."""
    found = dict.fromkeys(hours, 0.0)
    for (hour, producer), sums in stats.hours.items():
        wanted = producer == name if name is not None else producer not in shown
        if wanted and hour in found:
            found[hour] += sums.payload_bytes / _HOUR_S / 1e6
    return list(found.values())


def _label(text: str) -> str:
    """A name that matplotlib neither hides (a leading `_`) nor takes for mathematics (`$`)."""
    return " " + printable(text)[:60].replace("$", r"\$")
