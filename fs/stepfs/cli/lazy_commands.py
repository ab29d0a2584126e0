"""A group of commands of which only those that are called, or whose help is wanted, are imported.

To import fifteen commands and to make typer's parameters of them costs more than most commands take to run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import typer
from typer.core import TyperGroup

from stepfs.cli.failure import reported


class _Commands(Mapping[str, Any]):
    """Name → click's command, made at the first look at it."""

    def __init__(self, package: str, summaries: Mapping[str, str]) -> None:
        self._package = package
        self._summaries = summaries
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            summary = self._summaries[name]  # the KeyError of a name that is no command
            attribute = name.replace("-", "_")
            function = getattr(importlib.import_module(f"{self._package}.{attribute}"), attribute)
            one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
            one.command(name, short_help=summary)(reported()(function))
            self._made[name] = typer.main.get_command(one)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._summaries)

    def __len__(self) -> int:
        return len(self._summaries)


def lazy_group(package: str, summaries: Mapping[str, str]) -> type[TyperGroup]:
    """For `typer.Typer(cls=…)`. Command `some-name` is function `some_name` of module `PACKAGE.some_name`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Mapping[str, Any] = _Commands(package, summaries)  # type: ignore[assignment]

        def list_commands(self, ctx: Any) -> list[str]:
            del ctx
            return list(self.commands)

    return LazyGroup
