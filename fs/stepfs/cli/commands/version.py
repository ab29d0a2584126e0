"""`stepfs version`: the versions that a bug report needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from stepfs.cli.columns import json_text, printable
from stepfs.cli.options import Json

if TYPE_CHECKING:
    from stepfs.doctor.versions import Library, Versions


def version(as_json: Json = False) -> None:
    """Show the versions of stepfs, Python, kernel, libfuse and of the libraries.

    For a bug report, and to see which extras are installed. Whether it works here is what `stepfs doctor` finds out.
    """
    from stepfs.doctor.versions import versions

    found = versions()
    if as_json:
        document = asdict(found)
        document["libraries"] = {library.name: library.version for library in found.libraries}
        typer.echo(json_text(document))
        return
    rows = list(_rows(found))
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:{width}}  {printable(text)}")


def _rows(found: Versions) -> Iterator[tuple[str, str]]:
    yield "stepfs", found.stepfs
    yield "python", f"{found.python} at {found.executable}"
    yield "kernel", f"{found.kernel} {found.machine}"
    yield "libfuse", found.libfuse or "not found; `stepfs doctor` says what to do"
    yield "fusermount3", found.fusermount3 or "not found; only root can mount without it"
    for library in found.libraries:
        yield library.name, library.version or _remedy(library)


def _remedy(library: Library) -> str:
    name = "stepfs" if library.extra is None else f"stepfs[{library.extra}]"
    return f"not installed: pip install '{name}'"
