"""What a command shows while it works: one screen of a terminal, and elsewhere a plain line every 10 s.

The command says how far it is, and a thread draws that four times a second: a store that does not answer stops neither
the clock nor the first frame, and a fast loop draws no more than that. A frame is one write over the one before, so nothing
flickers. rich loads only where something is drawn.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

from stepfs._internal import interruption
from stepfs._internal.clock import age_text
from stepfs.cli.columns import Row, printable, size_text
from stepfs.cli.failure import announce, is_a_log
from stepfs.mount.redact import redact_url

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

LINE_EVERY_S: Final = 10.0
_FRAMES_PER_S: Final = 4
_SLOT_S: Final = 1.0
_SLOTS: Final = 48  # of history, which is what a rate is the mean of
_CELL_MIN: Final = 12  # letters that a name keeps
_INDENT_MAX: Final = 10
_SHOW_CURSOR: Final = b"\x1b[?25h"
_LEAVE_SCREEN: Final = b"\x1b[?1049l"
_ASCII: Final = str.maketrans({"…": "...", "÷": "/", "≈": "~", "×": "x"})
_LABEL: Final = re.compile(r"\s*\S+\s{2,}")

Part = tuple[str, str]  # text and style


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a job is. `counts`: by name what grows; names with "bytes" are sizes. `whole`: what the first will be, if it is
    known. `notes`: lines below; `said`: what a plain line says instead.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    whole: float | None = None
    notes: Sequence[str] = ()
    said: str = ""


class History:
    """A count that grows: its rates, slot by slot."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, float]] = deque(maxlen=_SLOTS + 1)

    def note(self, now_s: float, count: float) -> None:
        if self._marks and count < self._marks[-1][1]:
            self._marks.clear()  # another process counts anew
        if not self._marks or now_s - self._marks[-1][0] >= _SLOT_S:
            self._marks.append((now_s, count))

    def rates(self) -> list[float]:
        marks = list(self._marks)
        return [(b - a) / (until - since) for (since, a), (until, b) in pairwise(marks)]

    def mean(self) -> float | None:
        """Per second; None before the second slot."""
        if len(self._marks) < 2:
            return None
        (since, first), (until, last) = self._marks[0], self._marks[-1]
        return (last - first) / (until - since)


@dataclass(frozen=True, slots=True)
class Letters:
    """What a terminal can show."""

    blocks: str = "▁▂▃▄▅▆▇█"
    bar: str = "━─"
    cut: str = "…"
    encoding: str = "utf-8"

    @classmethod
    def of(cls, encoding: str) -> Letters:
        return cls() if encoding.lower().startswith("utf") else cls("_.-:=+*#", "#-", "...", encoding)

    def shown(self, text: str) -> str:
        text = printable(text)
        if self.encoding == "utf-8":
            return text
        return text.translate(_ASCII).encode(self.encoding, "replace").decode(self.encoding)

    def line(self, rates: Sequence[float]) -> str:
        """A block for each rate; the highest is that of the greatest."""
        most = max(rates, default=0.0) or 1.0
        return "".join(self.blocks[min(round(rate / most * 7), 7)] for rate in rates)

    def fitted(self, text: str, width: int) -> str:
        """At most `width` letters: what is too long loses its middle, since names differ at both ends."""
        if len(text) <= width:
            return text
        kept = max(0, width - len(self.cut))
        return (text[: kept - kept // 2] + self.cut + text[len(text) - kept // 2 :])[:width]


class Job:
    """What is shown of one command. `follows`: it looks again and again, and its rates are those between two looks."""

    def __init__(self, name: str, *, follows: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._follows = follows
        self._clock = clock
        self._begun_s = clock()
        self._seen_s: float | None = None
        self._mark = Mark()
        self.unseen = False  # the terminal has gone
        self._histories: dict[str, History] = {}
        self._told: tuple[float, Mapping[str, float]] = (self._begun_s, {})

    def update(self, mark: Mark) -> None:
        if self._follows:
            self._sample(self._clock(), mark)
        self._mark, self._seen_s = mark, self._clock()  # behind it: a frame may be drawn at any time

    def _sample(self, now_s: float, mark: Mark) -> None:
        for name, count in mark.counts.items():
            self._histories.setdefault(name, History()).note(now_s, count)

    def line(self) -> str:
        """A line for a log; its rates are those since the line before."""
        now_s, mark = self._clock(), self._mark
        (before_s, before), self._told = self._told, (now_s, mark.counts)
        if not mark.counts:
            return printable(f"{self.name}: nothing yet after {age_text(now_s - self._begun_s)}")
        span_s = (now_s - before_s) or 1.0
        rates = {name: (count - before[name]) / span_s for name, count in mark.counts.items() if name in before}
        texts = _done(mark, next(iter(rates.values()), None))
        texts += [
            f"{_amount(name, rate)}/s" if "bytes" in name else f"{_amount(name, rate)} {name}/s"
            for name, rate in rates.items()
        ]
        return printable(f"{self.name}: {', '.join(texts)}" + (f"; {mark.said}" if mark.said else ""))

    def frame(self, width: int, height: int, letters: Letters) -> list[list[Part]]:
        """Lines of at most `width` letters, at most `height`."""
        now_s, mark = self._clock(), self._mark
        if not self._follows:
            self._sample(now_s, mark)
        rows = [self._title(now_s, width, letters), *self._counted(mark, width, letters)]
        rows += [[(line, "")] for line in fitted([*mark.notes], width, letters)]
        if len(rows) > height:
            rows[height - 1 :] = [[(f"{letters.cut} and {len(rows) - height + 1} lines more", "dim")]]
        return rows

    def _title(self, now_s: float, width: int, letters: Letters) -> list[Part]:
        since_s = now_s - (self._begun_s if self._seen_s is None or not self._follows else self._seen_s)
        time_shown = _clock_text(since_s)
        if self._follows:
            time_shown = f"no answer for {time_shown}" if self._seen_s is None or since_s >= 3 * _SLOT_S else ""
        name = letters.fitted(letters.shown(self.name), width - len(time_shown) - 2)
        return [(name, "bold"), (" " * (width - len(name) - len(time_shown)) + time_shown, "")]

    def _counted(self, mark: Mark, width: int, letters: Letters) -> Iterator[list[Part]]:
        if not mark.counts:
            yield [("" if self._follows else "looking", "dim")]
            return
        first, done = next(iter(mark.counts.items()))
        if mark.whole:
            part, room = min(1.0, done / mark.whole), width - 8
            full = int(part * room)
            yield [(letters.bar[0] * full, "cyan"), (letters.bar[1] * (room - full), "dim"), (f" {part:6.1%}", "")]
        if not self._follows:
            yield [(letters.fitted(", ".join(_done(mark, self._histories[first].mean())), width), "")]
        wide = max(map(len, mark.counts))
        for name in mark.counts:
            rate, rates = self._histories[name].mean(), self._histories[name].rates()
            text = f"{name:{wide}} {'-' if rate is None else _amount(name, rate) + '/s':>11}  "
            yield [(text, ""), (letters.line(rates[max(0, len(rates) - width + len(text)) :]), "cyan")]
        yield []


def _done(mark: Mark, rate: float | None) -> list[str]:
    """What is done, of the first count with its whole and the time that is left."""
    (first, done), *others = mark.counts.items()
    size = "bytes" in first
    of = "" if mark.whole is None else f" of {size_text(int(mark.whole)) if size else int(mark.whole)}"
    texts = [f"{size_text(int(done)) if size else int(done)}{of}" + ("" if size else f" {first}")]
    texts += [_amount(name, count) + ("" if "bytes" in name else f" {name}") for name, count in others]
    if mark.whole and rate and done < mark.whole:
        texts.append(f"{age_text((mark.whole - done) / rate)} left")
    return texts


def _amount(name: str, count: float) -> str:
    return size_text(round(count)) if "bytes" in name else short(count)


def short(count: float) -> str:
    """Three digits and more: 0.25, 12, 1.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}" if count == int(count) or count >= 100 else f"{count:.2f}"


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def fitted(lines: Sequence[str], width: int, letters: Letters) -> Iterator[str]:
    """Lines for a terminal of `width` letters: a sentence goes on below itself, the widest cells of a table are shortened."""
    for cells, group in groupby(lines, lambda line: len(line.cells) if isinstance(line, Row) else 0):
        if cells:
            yield from _narrowed(
                [[letters.shown(cell) for cell in row.cells] for row in group if isinstance(row, Row)], width, letters
            )
            continue
        for line in map(letters.shown, group):
            label = _LABEL.match(line)
            indent = min(label.end(), _INDENT_MAX, width // 4) if label else 0
            yield from wrap(line, width, subsequent_indent=" " * indent) or [""]


def _narrowed(rows: list[list[str]], width: int, letters: Letters) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    least = [min(wide, max(_CELL_MIN, len(head))) for wide, head in zip(widths, rows[0], strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and widths != least:
        widest = max(range(len(widths)), key=lambda n: widths[n] - least[n])
        widths[widest] -= 1
    for row in rows:
        line = "  ".join(
            letters.fitted(cell, wide).ljust(wide) for cell, wide in zip(row, widths, strict=True)
        ).rstrip()
        yield line if len(line) <= width else line[: width - len(letters.cut)] + letters.cut


@contextmanager
def progress(name: str, lake: str = "", *, quiet: bool = False) -> Iterator[Job]:
    """A job that is shown on stderr until the block ends; nothing of it stays on a terminal. `quiet`: it is not shown."""
    job = Job(f"{name} {redact_url(lake)}".rstrip())
    if quiet:
        yield job
    elif is_a_log():
        with _told(job):
            yield job
    else:
        with _drawn(job, sys.stderr):
            yield job


@contextmanager
def watched(target: str) -> Iterator[Job]:
    """The status of a lake or a mount, which fills the terminal of stdout until the block ends, and leaves it as it was."""
    job = Job(f"status {redact_url(target)}", follows=True)
    with _drawn(job, sys.stdout, screen=True):
        yield job


def print_above(text: str) -> None:
    """Print a line, or several, on stdout, above what is drawn there: `typer.echo` would write into it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def _told(job: Job) -> Iterator[None]:
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(LINE_EVERY_S):
            announce(job.line())

    thread = threading.Thread(target=tell, name="stepfs progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)  # not longer: nobody may read stderr


class _Stream:
    """A terminal that may go while the command goes on, as behind `disown`."""

    def __init__(self, stream: TextIO, job: Job) -> None:
        self._stream, self._job = stream, job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        self._try(partial(self._stream.write, text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError:
            self._job.unseen = True


class _Frames:
    """A job as rich draws it."""

    def __init__(self, job: Job, *, screen: bool) -> None:
        self._job, self._screen = job, screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        height = console.size.height - (not self._screen)
        for row in self._job.frame(options.max_width, max(1, height), Letters.of(console.encoding)):
            yield Text.assemble(*row, no_wrap=True, overflow="crop")


@contextmanager
def _drawn(job: Job, stream: TextIO, *, screen: bool = False) -> Iterator[None]:
    """What is printed meanwhile comes above the frame; if the process is ended in the middle, the terminal is as it was."""
    from rich.console import Console
    from rich.live import Live

    console = Console(
        file=cast("TextIO", _Stream(stream, job)), force_terminal=True, force_interactive=True, highlight=False
    )
    live = Live(
        _Frames(job, screen=screen),
        console=console,
        screen=screen,
        refresh_per_second=_FRAMES_PER_S,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    before = sys.stderr
    logs = [one for one in logging.root.handlers if isinstance(one, logging.StreamHandler) and one.stream is before]
    with interruption.drawing(stream.fileno(), (_LEAVE_SCREEN if screen else b"") + _SHOW_CURSOR):
        try:
            live.start()  # rich's thread draws all frames but the last: Ctrl-C comes in the middle of none
            for handler in logs:
                handler.setStream(sys.stderr)
            yield
        finally:
            for handler in logs:
                handler.setStream(before)
            live.stop()
