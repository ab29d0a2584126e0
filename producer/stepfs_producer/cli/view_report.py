"""What `stepfs-produce view` prints: documents as text, coloured by what is learned, or marked where there are no colours."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from stepfs._internal import interruption
from stepfs.cli.columns import json_text, printable, table
from stepfs.cli.failure import announce
from stepfs.cli.target import opened_lineage
from stepfs.errors import AbsentError, RefusedError, StepfsError, UsageError
from stepfs.payload import last_suffix
from stepfs_producer.cli.lineage_report import LineageQuery
from stepfs_producer.cli.reports import refuse
from stepfs_producer.plan.values import nearest
from stepfs_producer.run.check import inspect
from stepfs_producer.run.prepare import LocatedPlan, plan_file_at
from stepfs_producer.run.view import (
    Document,
    Part,
    Row,
    Seen,
    Words,
    escaped,
    of_micro,
    rows_of,
    samples_of,
    seen_in_lake,
)

_SHOWN: Final = 400  # characters of a longer text, and as many tokens of its ids
_TAIL: Final = 120  # of them, at its end
_LEARNED: Final = "bold green"
_NAMED: Final = "cyan"


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """How rows are shown."""

    source: str | None
    ids: bool
    full: bool
    as_json: bool


def view_plan(path: Path, count: int, options: ViewOptions, *, held_out: bool) -> None:
    """Print samples of a plan. Its mistakes are those that `check` names."""
    file = plan_file_at(path)
    if options.source is not None and options.source not in file.plan.sources:
        raise UsageError(f"the plan has no source {options.source!r}{nearest(options.source, file.plan.sources)}")
    place = LocatedPlan(file.plan, str(path.parent), held_out, path)
    try:
        seen = interruption.run(partial(samples_of, place, options.source, count, _say))
    except (StepfsError, ExceptionGroup):  # of a nursery
        found = inspect(file.plan, held_out=held_out, directory=place.directory)
        if found.findings:
            refuse(file, found)
        raise
    _print(seen, options)


def view_lake(asked: LineageQuery, plan_dir: str, options: ViewOptions) -> None:
    """Print the rows of a step."""

    async def look() -> Seen:
        async with opened_lineage(asked.lake, asked.options) as reader:
            return await seen_in_lake(reader, asked.wanted, plan_dir, _say)

    _print(interruption.run(look), options)


def view_file(path: Path, micro: int | None, options: ViewOptions) -> None:
    """Print the rows of a payload that lies outside of a mount, whose tokenizer nobody knows."""
    if path.exists() and not path.is_file():  # opening a FIFO waits for a writer
        raise UsageError(f"{path}: is not a regular file; name a file that holds one payload")
    try:
        payload = path.read_bytes()
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such file; name a plan, a lake, or a file of a mount") from error
    except OSError as error:
        raise RefusedError(f"{path}: {error.strerror}; name a readable file") from error
    words = Words(why="a file does not say its tokenizer; for text name it in a mount, or LAKE --step N --rank R")
    rows = of_micro(rows_of(last_suffix(path.name), payload, str(path), words), micro)
    _print(Seen(words, rows, {"file": str(path)}), options)


def _say(line: str) -> None:
    announce(printable(line))


def _print(seen: Seen, options: ViewOptions) -> None:
    if options.source is not None:
        known = {one.source or "" for row in seen.rows for one in row.documents}
        if known and options.source not in known:
            raise AbsentError(
                f"no document of source {options.source!r} is here; there are: {', '.join(sorted(known))}"
            )
        seen = replace(seen, rows=[row.of(options.source) for row in seen.rows])
    if options.as_json:
        typer.echo(json_text(_document(seen)))
        return
    console = Console(highlight=False)
    pen = _Pen(console.color_system is not None and not console.no_color, options)
    for line in _lines(seen, pen):
        if console.is_terminal:
            console.print(line if isinstance(line, str) else Padding(line, (0, 0, 0, 2)), markup=False)
        else:
            typer.echo(line if isinstance(line, str) else "  " + line.plain.replace("\n", "\n  "))


def _document(seen: Seen) -> dict[str, Any]:
    places = dict.fromkeys(("plan", "lake", "lake_id", "step", "producer", "file"))
    rows = [
        {**asdict(row), "documents": [{**asdict(one), "learned": one.learned} for one in row.documents]}
        for row in seen.rows
    ]
    return {**places, **seen.place, "problem": seen.words.why or None, "sources": _sources(seen.rows), "rows": rows}


def _sources(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for one in (one for row in rows for one in row.documents):
        sums = found.setdefault(one.source or "", {"documents": 0, "tokens": 0, "learned": 0})
        for name, more in (("documents", 1), ("tokens", one.tokens), ("learned", one.learned)):
            sums[name] += more
    return dict(sorted(found.items()))


class _Pen:
    """Writes the parts of documents. A mark of ours, such as ⟨eos⟩, is never a part of a record: there ⟨ is escaped."""

    def __init__(self, colours: bool, options: ViewOptions) -> None:
        self._colours, self._options = colours, options
        encoding = sys.stdout.encoding or "ascii"
        self._wide = "?" not in "⟨⟩↵…×┌┐".encode(encoding, "replace").decode(encoding)
        self._open, self._close, self._line, self._dots = "⟨⟩↵…" if self._wide else ("<", ">", "\\n", "...")

    @property
    def legend(self) -> Text:
        learned = ("learned", _LEARNED) if self._colours else ("[[learned]]", "")
        return Text.assemble(learned, "  not learned  ", (self._mark("token, or what is no text"), _NAMED))

    def written(self, document: Document) -> Text:
        pieces: list[tuple[str, str]] = []
        for learned, parts in groupby(document.parts, key=lambda one: bool(one.learned)):
            shown = [piece for part in parts for piece in self._pieces(part)]
            if learned and not self._colours:
                last = "".join(text for text, _ in shown)
                line = "\n" if last.endswith("\n") else ""
                shown = [(f"[[{last.removesuffix(line)}]]{line}", "")]
            pieces += shown
        if document.padding:
            pieces.append((self._mark(f"padding × {document.padding}"), "dim"))
        found = Text.assemble(*pieces)
        found.rstrip()
        return found

    def images(self, document: Document) -> list[Text]:
        return [Text(f"┌ {one} ┐" if self._wide else f"[{one}]".replace("×", "x"), "yellow") for one in document.images]

    def _mark(self, text: str) -> str:
        return f"{self._open}{text if self._wide else text.replace('×', 'x')}{self._close}"

    def _pieces(self, part: Part) -> Iterator[tuple[str, str]]:
        colour = _LEARNED if part.learned else ""
        shown = self._short(part.text) if part.text is not None else " ".join(self._few(part.ids))
        if part.kind == "text":
            yield shown, colour
        elif part.kind == "token":
            section = f"{part.section}: " if part.section and part.section not in shown else ""
            times = f" × {len(part.ids)}" if len(part.ids) > 1 else ""
            yield self._mark(f"{section}{shown}{times}"), f"{colour} reverse" if part.learned else _NAMED
        else:
            yield self._mark(f"cut; next: {shown}"), colour
        if self._options.ids and part.text is not None:
            yield self._mark(" ".join(self._few(part.ids))), "dim"

    def _few(self, ids: Sequence[int]) -> Sequence[str]:
        if self._options.full or len(ids) <= _SHOWN:
            return list(map(str, ids))
        left = f"{self._dots}{len(ids) - _SHOWN} more{self._dots}"
        return [*map(str, ids[: _SHOWN - _TAIL]), left, *map(str, ids[-_TAIL:])]

    def _short(self, text: str) -> str:
        if self._options.full or len(text) <= _SHOWN:
            return self._escaped(text)
        left = self._mark(f"{self._dots} {len(text) - _SHOWN} characters {self._dots}")
        return f"{self._escaped(text[: _SHOWN - _TAIL])} {left} {self._escaped(text[-_TAIL:])}"

    def _escaped(self, text: str) -> str:
        own = (self._open + self._close) if self._wide else ""  # else < and >, which are letters of every program
        shown = escaped(text, self._line, own)  # and what looks like a mark
        return shown if self._colours else shown.replace("[[", "[\\[").replace("]]", "]\\]")


def _lines(seen: Seen, pen: _Pen) -> Iterator[str | Text]:
    if "step" in seen.place:
        yield printable(f"step {seen.place['step']} by {seen.place['producer']}")
    if seen.words.why:
        yield printable(f"ids in place of text: {seen.words.why}")
    yield pen.legend
    of_plan = "plan" in seen.place
    for row in seen.rows:
        if not of_plan:
            rank = "" if row.rank is None else f"rank {row.rank}, "
            yield f"-- {rank}micro-batch {row.micro}, row {row.row}: {row.tokens} tokens, {row.padding} of padding"
        for one in row.documents:
            yield ""
            yield _heading(one)
            yield from pen.images(one)
            yield pen.written(one)
    yield ""
    yield from _summary(seen)


def _heading(one: Document) -> str:
    if one.source is None:
        return f"document at {one.start}: {_count(one)}"
    side = "" if one.side is None else f" {one.side.upper()}"
    first = f", from its token {one.first} on" if one.first and one.side is None else ""
    tag = f", tag {one.tag}" if one.tag else ""
    return printable(f"{one.source}{side}  record {one.record} of {one.file}{first}{tag}: {_count(one)}")


def _count(one: Document) -> str:
    known = any(part.learned is not None for part in one.parts)
    return f"{one.tokens} tokens, " + (f"{one.learned} learned" if known else "and no labels in such files")


def _summary(seen: Seen) -> Iterator[str]:
    sums = _sources(seen.rows)
    cells = [
        [printable(name), str(one["documents"]), str(one["tokens"]), f"{one['learned'] / one['tokens']:.1%}"]
        for name, one in sums.items()
        if name
    ]
    yield from table(["SOURCE", "DOCUMENTS", "TOKENS", "LEARNED"], cells)
    for name, one in sums.items():
        source = None if seen.words.plan is None else seen.words.plan.sources.get(name)
        of_chats = source is not None and source.is_of_chats
        if name and not one["learned"]:
            yield printable(f"note: source {name}: nothing of what is shown is learned")
        elif of_chats and one["learned"] >= one["tokens"] - one["documents"]:
            yield printable(f"note: source {name}: all is learned, the user's words too")
        ends = {
            end for row in seen.rows for each in row.documents if each.source == name for end in _unlearned_ends(each)
        }
        for end in sorted(ends):
            yield printable(
                f"note: source {name}: {end} behind an answer is not learned, so a model learns no end of it"
            )


def _unlearned_ends(document: Document) -> Iterator[str]:
    for answer, end in pairwise(document.parts):
        if answer.learned and answer.kind == "text" and (answer.text or "").strip() and not end.learned:
            yield from [end.text or ""] if end.kind == "token" else []
