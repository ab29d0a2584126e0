"""A report as one HTML file, which only its owner can read, because it holds what the data holds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Final

from stepfs._internal.clock import age_text
from stepfs.errors import AbsentError, RefusedError, UsageError
from stepfs_producer.report.charts import COLOURS, MARKS, Axis, Line, drawn
from stepfs_producer.report.figures import DAY_S, Contents, Report, Run, without_secrets
from stepfs_producer.run.view import Part, Row, escaped

_TEXT_MAX: Final = 400  # characters of a part
_TAIL: Final = 120  # of them, at its end
_PARTS_MAX: Final = 40  # of a document
_DOCUMENTS_MAX: Final = 6  # of a row
_ROWS_CHARACTERS_MAX: Final = 200_000  # of all rows: at most 4 bytes each, and 5 of a quotation mark
_LINES_MAX: Final = 100  # of a table
_MARKUP: Final = 40  # characters around a part
_AHEAD: Final = 3  # times the time that is known, at most, of a forecast in a chart
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_BEGINNING: Final = b"<!doctype html>"
STEP: Final = Axis("step")


def check_place(path: Path) -> None:
    """Refuse before any work what `write` would refuse behind it."""
    if path.exists() and not path.is_file():
        raise UsageError(f"--out {path}: is no regular file; name a file, such as report.html")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            if not file.read(len(_BEGINNING)).lower().startswith(_BEGINNING):
                raise RefusedError(f"--out {path}: is there, and is no page; name another file")
    if not path.absolute().parent.is_dir():
        raise AbsentError(f"--out {path}: there is no directory {path.absolute().parent}; make it first")


def write(path: Path, text: str) -> None:
    """Put it there whole, mode 0600, or leave what is there."""
    own = path.with_name(f".stepfs-report-{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        own.replace(path)
    except OSError as error:
        why = error.strerror or error
        raise RefusedError(f"--out {path}: {why}; nothing was left there, make room or name another file") from error
    finally:
        with suppress(OSError):
            own.unlink()


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing with its title, the names of its colours, and what else a reader must know."""

    title: str
    svg: str
    legend: Sequence[str] = ()
    note: str = ""


def page_of(report: Report, filters: Mapping[str, Callable[..., str]], *, text: bool) -> str:
    """The page. `filters`: how sizes (`size`) and times in milliseconds (`when`) are written."""
    import jinja2  # noqa: PLC0415 - slow

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"shown": escaped, "age": age_text, "url": without_secrets, **filters}
    rows = list(_within(report.rows))
    return environment.from_string(files(__package__).joinpath("page.html").read_text("utf-8")).render(
        report=report,
        text=text,
        rows=rows,
        rows_left=len(report.rows) - len(rows),
        marks=MARKS,
        contents=[(one, [*_charts_of(one)]) for one in report.contents],
        run_charts=[] if report.run is None else [*_charts_of_run(report.run, report.time)],
        documents_max=_DOCUMENTS_MAX,
        parts_max=_PARTS_MAX,
        lines_max=_LINES_MAX,
        piece=_piece,
    )


def _within(rows: Sequence[tuple[str, Row]]) -> Iterator[tuple[str, Row]]:
    """The first rows whose texts have room in a page."""
    left = _ROWS_CHARACTERS_MAX
    for place, row in rows:
        parts = [part for one in row.documents[:_DOCUMENTS_MAX] for part in one.parts[:_PARTS_MAX]]
        left -= sum(len(_piece(part)[1]) + _MARKUP for part in parts)
        if left < 0:
            return
        yield place, row


def _piece(part: Part) -> tuple[str, str]:
    """Its class and its text."""
    words = list(part.text) if part.text is not None else [f"{one} " for one in part.ids]
    what = "characters" if part.text is not None else "ids"
    shown = escaped("".join(words))
    if len(words) > _TEXT_MAX:
        head, tail = (escaped("".join(one)) for one in (words[: _TEXT_MAX - _TAIL], words[-_TAIL:]))
        shown = f"{head} … {len(words) - _TEXT_MAX} {what} more … {tail}"
    learned = " learned" if part.learned else ""
    if part.kind == "text":
        return f"text{learned}", shown
    times = f" × {len(part.ids)}" if part.kind == "token" and len(part.ids) > 1 else ""
    section = f"{part.section}: " if part.kind == "token" and part.section else ""
    return f"mark{learned}", f"cut; next: {shown}" if part.kind == "cut" else f"{section}{shown}{times}"


def _charts_of(one: Contents) -> Iterator[Chart]:
    ordered = sorted(one.sources, key=lambda name: (-one.sources[name].tokens, name))
    own = ordered if len(ordered) <= COLOURS else ordered[: COLOURS - 1]
    others = ordered[len(own) :]
    legend = [*own, f"{len(others)} others"] if others else own
    groups = [[name] for name in own] + ([others] if others else [])
    if one.shares:
        x = [(point.first + point.next - 1) / 2 for point in one.shares]
        lines = []
        for number, names in enumerate(groups):
            given = [
                100 * sum(point.tokens.get(name, 0) for name in names) / max(sum(point.tokens.values()), 1)
                for point in one.shares
            ]
            wanted = [100 * sum(point.wanted.get(name, 0.0) for name in names) for point in one.shares]
            lines += [Line(x, wanted, number, dashed=True), Line(x, given, number)]
        stages = [stage for stage in one.stages[1:] if stage["from"] <= one.shares[-1].next]
        begins = ", ".join(f"{stage['from']} with rows of {stage['sequence_length']}" for stage in stages)
        note = "Dashed: the mix of the plan." + (f" Dotted: stages, from step {begins}." if stages else "")
        borders = [stage["from"] for stage in stages]
        share = Axis("share of tokens", "percent", least=0)
        yield Chart("Share of tokens by source", drawn(lines, STEP, share, borders), legend, note)
    yield from _charts_of_looks(one)
    lengths = [
        list(map(sum, zip_longest(*(one.sources[name].lengths for name in names), fillvalue=0))) for names in groups
    ]
    if any(map(sum, lengths)):
        top = max(map(len, lengths))
        lines = [
            Line(range(len(each)), [100 * count / sum(each) for count in each], number)
            for number, each in enumerate(lengths)
            if sum(each)
        ]
        x_axis = Axis("tokens of a document, at least", "power", -0.3, max(top, 2) - 0.7)
        svg = drawn(lines, x_axis, Axis("share of its documents", "percent", least=0))
        yield Chart("Length of documents, as rows hold them", svg, legend)


def _charts_of_looks(one: Contents) -> Iterator[Chart]:
    x = [look.step for look in one.looked]
    if not x:
        return
    fill = Line(x, [100 * look.fill for look in one.looked])
    yield Chart("Fill of rows: tokens ÷ room", drawn([fill], STEP, Axis("fill", "percent", most=100)))
    loads = sorted({load for look in one.looked for load in look.slowest}, key=lambda load: (load != "cost", load))
    if loads:
        lines = [
            Line([look.step for look in one.looked if load in look.slowest],
                 [look.slowest[load] for look in one.looked if load in look.slowest], number)
            for number, load in enumerate(loads)
        ]  # fmt: skip
        svg = drawn(lines, STEP, Axis("slowest ÷ mean rank", least=1))
        yield Chart("Slowest ÷ mean rank: 1 is even", svg, loads[:COLOURS])


def _charts_of_run(run: Run, now_s: float) -> Iterator[Chart]:
    if not run.commits:
        return
    names = sorted({one.producer for one in run.commits})
    lines = []
    for number, name in enumerate(names[:COLOURS]):
        own = [one for one in run.commits if one.producer == name]
        lines.append(Line([one.time for one in own], [one.producer_steps for one in own], number))
    time = Axis("time of the commit, UTC", "time")
    left = f"{len(names) - COLOURS} more producers are not drawn." if len(names) > COLOURS else ""
    yield Chart("Steps committed, by producer", drawn(lines, time, Axis("steps", least=0)), names[:COLOURS], left)
    seen = Line([one.time for one in run.commits], [one.total_bytes for one in run.commits])
    lines, last, span_s = [seen], run.commits[-1], run.commits[-1].time - run.commits[0].time
    until = None if run.forecast is None else run.forecast.full or run.forecast.ends
    if run.forecast is not None and until is not None and now_s - last.time < span_s:
        until = min(until, now_s + _AHEAD * span_s)
        more = run.forecast.bytes_per_day * (until - now_s) / DAY_S
        lines.append(Line([now_s, until], [last.total_bytes, last.total_bytes + more], dashed=True))
    power = min(max(0, (int(lines[-1].y[-1]).bit_length() - 1) // 10), len(_UNITS) - 1)
    lines = [replace(line, y=[size / 1024**power for size in line.y]) for line in lines]
    svg = drawn(lines, time, Axis(_UNITS[power], least=0))
    note = "Dashed: at the pace of the last commits." if len(lines) > 1 else ""
    yield Chart("Bytes committed, reclaimed ones included", svg, (), note)
