"""Which page of the site has which part of the tree's pages, and where a link into them leads.

A part is `FILE` (all of it), `FILE#` (what stands before its first section) or `FILE#ANCHOR` (a section with its
subsections, but for those that are a page of their own). What no page names becomes a page in `Rest`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from site_pages.prose import Heading, for_mkdocs, headings, prose_of, relinked, slug
from site_pages.prose import links as links_in

SCHEMAS: Final = "fs/schemas/"
_FILE_NAME: Final = re.compile(r"\[([\w/]*\b[A-Z]+(?:\.md)?)\]\(([^)\s]+\.md[^)\s]*)\)")


class Page(NamedTuple):
    """A page: its place on the site, without ending; its name in the menu; parts of the tree's pages; what the code says."""

    place: str
    name: str
    parts: tuple[str, ...] = ()
    generated: Callable[[], str] | None = None


class Group(NamedTuple):
    """A heading of the menu; `rest`: the file whose sections on no other page are pages here."""

    name: str
    members: tuple[Page | Group, ...]
    rest: str = ""


class LinkError(Exception):
    """A link leads nowhere."""


@dataclass
class _File:
    """A page of the tree, and the page of the site that has each of its lines."""

    name: str
    text: str
    lines: list[str] = field(init=False)
    headings: list[Heading] = field(init=False)
    owners: list[str] = field(init=False)
    spans: list[int] = field(init=False)  # how many lines the part has that owns a line: the smallest one wins

    def __post_init__(self) -> None:
        self.lines, self.headings = self.text.split("\n"), headings(self.text)
        self.owners, self.spans = [""] * len(self.lines), [1 << 30] * len(self.lines)

    def range_of(self, part: str) -> range:
        """The lines of a part."""
        _, hash_, anchor = part.partition("#")
        if not hash_:
            return range(len(self.lines))
        if not anchor:
            return range(next((one.line for one in self.headings if one.level > 1), len(self.lines)))
        for at, one in enumerate(self.headings):
            if one.anchor == anchor:
                later = (other.line for other in self.headings[at + 1 :] if other.level <= one.level)
                return range(one.line, next(later, len(self.lines)))
        raise LinkError(f"the menu of the site names {part}, and there is no such heading")

    def claim(self, part: str, place: str) -> None:
        lines = self.range_of(part)
        for line in lines:
            if len(lines) < self.spans[line]:
                self.owners[line], self.spans[line] = place, len(lines)


class Site:
    """All pages with their texts, and the pictures that they show."""

    def __init__(self, root: Path, menu: Iterable[Group]) -> None:
        self.root = root
        self.files: dict[str, _File] = {}
        self.pictures: dict[str, Path] = {}
        self.menu = [*menu]
        for page in _pages(self.menu):
            self._claim(page)
        self.menu = [self._with_rest(group) for group in self.menu]

    def texts(self, *, generated: bool = True) -> Iterator[tuple[str, str]]:
        """(place, markdown) of each page; without what is `generated`, or with it. `LinkError` for the first wrong link."""
        for page in _pages(self.menu):
            made = page.generated() if generated and page.generated else ""
            yield page.place, "\n".join([*self._text(page), made])

    def navigation(self) -> list[object]:
        """As mkdocs wants it."""
        return [_navigation(group) for group in self.menu]

    def _claim(self, page: Page) -> None:
        for part in page.parts:
            name = part.partition("#")[0]
            if name not in self.files:
                self.files[name] = _File(name, (self.root / name).read_text(encoding="utf-8"))
            self.files[name].claim(part, page.place)

    def _with_rest(self, group: Group) -> Group:
        members = tuple(self._with_rest(one) if isinstance(one, Group) else one for one in group.members)
        if not group.rest:
            return group._replace(members=members)
        file, folder = self.files[group.rest], posixpath.dirname(next(_pages([group])).place)
        rest = [one for one in file.headings if one.level == 2 and not file.owners[one.line]]
        more = [Page(posixpath.join(folder, one.anchor), one.title, (f"{file.name}#{one.anchor}",)) for one in rest]
        for page in more:
            self._claim(page)
        return group._replace(members=(*members, *more))

    def _text(self, page: Page) -> Iterator[str]:
        for number, part in enumerate(page.parts):
            file = self.files[part.partition("#")[0]]
            lines = [line for line in file.range_of(part) if file.owners[line] == page.place]
            outside = dict(prose_of(file.text))
            levels = {one.line: one for one in file.headings}
            top = next((levels[line].level for line in lines if line in levels), 1)
            down = (1 if number == 0 else 2) - top
            made = []
            for line in lines:
                text = file.lines[line]
                if line in levels:
                    one = levels[line]
                    text = f"{'#' * (one.level + down)} {one.title} {{ #{one.anchor} }}"
                elif line in outside:
                    text = relinked(text, {old: self._link(file.name, old, page.place) for old in links_in(text)})
                    text = _FILE_NAME.sub(lambda link: f"[{self._name(page.place, link[2])}]({link[2]})", text)
                made.append(text)
            yield from for_mkdocs(made)
            yield ""

    def _link(self, source: str, target: str, place: str) -> str:
        """Where a link of a page of the tree leads, from a page of the site."""
        if target.partition(":")[0] in {"https", "http", "mailto"}:
            return target
        path, _, anchor = target.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        here = posixpath.dirname(place) or "."
        if name in self.files:
            return posixpath.relpath(f"{self._owner(name, anchor)}.md", here) + (f"#{anchor}" if anchor else "")
        if name.startswith(SCHEMAS):
            return posixpath.relpath("reference/documents.md", here) + f"#{slug(posixpath.basename(name))}"
        if name.endswith((".png", ".svg")) and (self.root / name).is_file():
            self.pictures[f"pictures/{posixpath.basename(name)}"] = self.root / name
            return posixpath.relpath(f"pictures/{posixpath.basename(name)}", here)
        raise LinkError(f"{source}: {target} is on no page of the site")

    def _name(self, place: str, target: str) -> str:
        """What the menu calls the page of a link, whose words name a file of the tree."""
        owner = posixpath.normpath(posixpath.join(posixpath.dirname(place), target.partition("#")[0])).removesuffix(
            ".md"
        )
        return next(page.name for page in _pages(self.menu) if page.place == owner)

    def _owner(self, name: str, anchor: str) -> str:
        file = self.files[name]
        line = next((one.line for one in file.headings if one.anchor == anchor), None) if anchor else 0
        if line is None or not file.owners[line]:
            raise LinkError(f"{name}#{anchor}: there is no such heading")
        return file.owners[line]


def _pages(members: Iterable[Page | Group]) -> Iterator[Page]:
    for one in members:
        if isinstance(one, Page):
            yield one
        else:
            yield from _pages(one.members)


def _navigation(one: Page | Group) -> Mapping[str, object]:
    if isinstance(one, Page):
        return {one.name: f"{one.place}.md"}
    return {one.name: [_navigation(each) for each in one.members]}
