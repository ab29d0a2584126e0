"""Charts as SVG that takes its colours from the page, so that one drawing fits light and dark.

Texts in a chart are ours: names, which may be of any script and length, stand in the page's legends.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from stepfs.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: Final = 7
MARKS: Final = "●■▲◆▼✚✖"  # as the markers below
_MARKERS: Final = "os^DvPX"
_MARKED_MAX: Final = 24  # points of a line with a marker at each
_INCHES: Final = (5.6, 2.8)
_INK: Final = "#010203"
_GRID: Final = "#040506"
_SERIES: Final = [f"#0708{number:02x}" for number in range(COLOURS)]
_STYLE: Final[Mapping[str, Any]] = {
    "svg.fonttype": "none",  # texts, not outlines
    "svg.hashsalt": "stepfs",  # equal figures give equal pages
    "text.parse_math": False,
    "font.size": 11,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "path.simplify": True,
}
_TIMES: Final = ((600.0, "%H:%M:%S"), (86_400.0, "%H:%M"), (864_000.0, "%b %d %H:%M"), (float("inf"), "%Y-%m-%d"))
_YEAR_S_MAX: Final = 253_402_300_799  # of the year 9999


@dataclass(frozen=True, slots=True)
class Line:
    """One series. `colour`: its number; dashed lines are what is wanted or expected."""

    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label with the unit; kind `number`, `percent`, `time` (seconds since 1970) or `power` (of two)."""

    label: str
    kind: str = "number"
    least: float | None = None
    most: float | None = None


def require_library() -> None:
    """`MissingPackageError` without the library that draws."""
    try:
        import matplotlib as _  # noqa: F401, ICN001, PLC0415
    except ImportError as error:
        raise MissingPackageError("reports need the package matplotlib: pip install 'stepfs[report]'") from error


def drawn(lines: Sequence[Line], x: Axis, y: Axis, borders: Sequence[float] = ()) -> str:
    """An <svg> without size; `borders` are vertical lines at these places of x."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its cache
    from matplotlib import rc_context  # noqa: PLC0415 - optional, and slow
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context(dict(_STYLE)):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for line in lines:
            _draw(axes, line, x)
        for place in borders:
            axes.axvline(place, color=_INK, linewidth=1.2, linestyle=":")
        _set_up(axes, x, y)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _of_page(buffer.getvalue())


def _draw(axes: Axes, line: Line, x: Axis) -> None:
    number = line.colour % COLOURS
    points = [
        (at, value) for at, value in zip(line.x, line.y, strict=True) if x.kind != "time" or 0 <= at < _YEAR_S_MAX
    ]
    axes.plot(
        [at for at, _ in points],
        [value for _, value in points],
        color=_SERIES[number],
        linewidth=1.2 if line.dashed else 1.8,
        linestyle="--" if line.dashed else "-",
        marker=None if line.dashed or len(points) > _MARKED_MAX else _MARKERS[number],
        markersize=4,
    )


def _set_up(axes: Axes, x: Axis, y: Axis) -> None:
    from matplotlib import ticker  # noqa: PLC0415

    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    axes.set_xlim(x.least, x.most)
    axes.set_ylim(y.least, y.most)
    for axis, which in ((axes.xaxis, x), (axes.yaxis, y)):
        if which.kind == "time":
            begin, end = axes.dataLim.intervalx
            places = [begin + (end - begin) * number / 3 for number in range(4)] if 0 < begin < end else []
            form = next(form for span_s, form in _TIMES if end - begin < span_s)
            forms = [f"{form}\n%Y-%m-%d" if number == 0 and "%Y" not in form else form for number in range(len(places))]
            texts = [datetime.fromtimestamp(at, UTC).strftime(one) for at, one in zip(places, forms, strict=True)]
            axis.set_ticks(places, texts)
        elif which.kind == "power":
            ticks = range(0, int(which.most or 0) + 1, max(1, round((which.most or 0) / 6)))
            axis.set_ticks(list(ticks), [f"{1 << tick:,}" for tick in ticks])
        else:
            axis.set_major_locator(ticker.MaxNLocator(5))
            axis.set_major_formatter(partial(_number, kind=which.kind))


def _number(value: float, _place: int | None, kind: str) -> str:
    if kind == "percent":
        return f"{value:.4g} %"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.5g}"


def _of_page(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true">', svg, count=1)
    svg = re.sub(r'<g id="(?:figure|axes|patch|matplotlib|xtick|ytick|line2d|text)[\w.]*">', "<g>", svg)
    for name, colour in [("ink", _INK), ("grid", _GRID), *((f"c{at}", one) for at, one in enumerate(_SERIES))]:
        svg = svg.replace(colour, f"var(--{name})")
    return svg
