"""Pages in markdown: where their headings are, and what markdown on a forge reads otherwise than mkdocs.

A page of the tree is read on a forge, by `stepfs help` and here, so it stays plain: the differences are made up for.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_HEADING: Final = re.compile(r"^(#{1,6}) (.+)$")
_ITEM: Final = re.compile(r"^( *)([*-]|\d+\.) ")
_TABLE: Final = re.compile(r"^ *\|")
_CODE: Final = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_LINK: Final = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


class Heading(NamedTuple):
    """A heading, the line on which it stands, and its anchor as a forge makes it."""

    line: int
    level: int
    title: str
    anchor: str


def prose_of(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced blocks, with their numbers from 0."""
    fenced = False
    for number, line in enumerate(text.split("\n")):
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, line


def headings(text: str) -> list[Heading]:
    """In their order; an anchor that comes again gets `-1`, `-2` and so on."""
    found: list[Heading] = []
    seen: dict[str, int] = {}
    for number, line in prose_of(text):
        if match := _HEADING.match(line):
            anchor = slug(match[2])
            seen[anchor] = count = seen.get(anchor, -1) + 1
            found.append(Heading(number, len(match[1]), match[2], f"{anchor}-{count}" if count else anchor))
    return found


def slug(title: str) -> str:
    """The anchor of a heading on a forge."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def links(text: str) -> Iterator[str]:
    """The targets of all links and pictures; what stands in code is none."""
    for _, line in prose_of(text):
        yield from _LINK.findall(_CODE.sub("", line))


def relinked(line: str, new: dict[str, str]) -> str:
    """A line of prose whose targets are replaced."""
    return _LINK.sub(lambda match: new.get(match[1], match[1]), line)


def for_mkdocs(lines: list[str]) -> list[str]:
    """Of Python-Markdown: an inner list is indented by four, and a list or a table stands behind an empty line."""
    made: list[str] = []
    fenced = in_list = False
    for line in lines:
        if _FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            item, before = _ITEM.match(line), made[-1] if made else ""
            if item and 0 < len(item[1]) < 4:
                line = " " * (4 - len(item[1])) + line  # noqa: PLW2901
            begins = item and not item[1] and not in_list
            begins = begins or (_TABLE.match(line) and not _TABLE.match(before))
            if begins and before.strip():
                made.append("")
            in_list = bool(item) or (in_list and (not line or line[0] == " " or bool(before.strip())))
        made.append(line)
    return made


def escaped(text: str) -> str:
    """One line of plain text, of which only code in backquotes means something in markdown and in a cell of a table."""
    parts, at = [], 0
    joined = " ".join(text.split())
    for match in _CODE.finditer(joined):
        parts += [_plain(joined[at : match.start()]), code(match[2])]
        at = match.end()
    return "".join([*parts, _plain(joined[at:])])


def code(text: object) -> str:
    """As code, whatever is in it."""
    return f"<code>{_entities(html.escape(str(text), quote=False))}</code>" if str(text) else ""


def _plain(text: str) -> str:
    return _entities(html.escape(text, quote=False))


def _entities(text: str) -> str:
    """What markdown would read as its own, as entities."""
    return re.sub(r"[*_\[\]|`{}\\~#:]", lambda match: f"&#{ord(match[0])};", text)


def table(*rows: tuple[str, ...]) -> str:
    """The first row is the head; the cells are markdown. A column that is empty in every row is left out."""
    kept = [at for at in range(len(rows[0])) if any(row[at] for row in rows[1:])]
    head, *body = (tuple(row[at] for at in kept) for row in rows)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in body)]
    return "\n".join(lines) + "\n"
