"""`stepfs help`: the pages of the manual, which come with the package."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

import stepfs
from stepfs.cli.program import programs
from stepfs.errors import AbsentError

PAGES: Final = {
    "readme": "README.md",
    "guide": "GUIDE.md",
    "operations": "OPERATIONS.md",
    "semantics": "SEMANTICS.md",
    "json": "JSON.md",
    "payloads": "PAYLOADS.md",
    "planning": "PLANNING.md",
}
_HEADING: Final = re.compile(r"^(#{2,3}) (.+)$", re.MULTILINE)


def help(  # noqa: A001 - the command's name
    topic: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TOPIC]...", help="A command, a page, or words of a heading.", show_default=False),
    ] = None,
) -> None:
    """Show a command's help, or what the manual says of a topic; without one, list its pages and their headings."""
    words = " ".join(topic or ()).lower()
    texts = {page: _text(name) for page, name in PAGES.items()}
    found = [*_sections(texts, words)] if words else []
    if not words:
        for page, text in texts.items():
            typer.echo("\n".join([page, *(f"  {title}" for _, title in _HEADING.findall(text))]))
    elif words in texts:
        typer.echo(texts[words])
    elif command := _command(words):
        typer.echo(command)
    elif found:
        typer.echo("\n\n".join(found))
    else:
        raise AbsentError(f"the manual has no command, page or heading with {words!r}; `stepfs help` lists them")


def _text(name: str) -> str:
    """A page, of an installed package or of a checkout."""
    package = Path(stepfs.__file__).parent
    root = package.parents[1]
    places = (package / "pages", root, root / "fs", root / "producer")
    return next(place / name for place in places if (place / name).is_file()).read_text(encoding="utf-8")


def _sections(texts: dict[str, str], words: str) -> Iterator[str]:
    """The sections whose headings have the words, each to the next heading of its level."""
    for text in texts.values():
        headings = [*_HEADING.finditer(text)]
        for number, heading in enumerate(headings):
            if words in heading[2].lower():
                later = (one.start() for one in headings[number + 1 :] if len(one[1]) <= len(heading[1]))
                yield text[heading.start() : next(later, None)].strip()


def _command(name: str) -> str:
    """The help of a command of either program; '' if there is none of that name."""
    for group in programs():
        outer = typer.Context(group, info_name=group.name)
        command = group.get_command(outer, name)
        if command is not None:
            return str(command.get_help(typer.Context(command, info_name=name, parent=outer)))
    return ""
