"""The set-up of both programs: plain help with the exit codes, `--version`, and a line for each unknown variable.

A lazy group imports only the commands that are called, or whose help is wanted: to import fifteen commands and to make
typer's parameters of them costs more than most commands take to run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stepfs import __version__
from stepfs.cli.failure import reported
from stepfs.cli.variables import warn_of_unknown


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.command.name} {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
]


def new_program(name: str, about: str, exit_codes: str, group: type[TyperGroup] = TyperGroup) -> typer.Typer:
    """A program without commands yet."""
    app = typer.Typer(
        name=name,
        cls=group,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=f"Exit codes: {exit_codes}.",
    )

    @app.callback(help=about)
    def before_each_command(*, _version: _Version = False) -> None:
        warn_of_unknown()

    return app


def lazy_group(package: str, summaries: Mapping[str, str]) -> type[TyperGroup]:
    """For `typer.Typer(cls=…)`. Command `some-name` is function `some_name` of module `PACKAGE.some_name`."""

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: dict[str, Any] = dict.fromkeys(summaries)  # each made at the first look at it

        def list_commands(self, ctx: Any) -> list[str]:
            del ctx
            return list(summaries)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            del ctx
            if cmd_name in summaries and self.commands[cmd_name] is None:
                attribute = cmd_name.replace("-", "_")
                function = getattr(importlib.import_module(f"{package}.{attribute}"), attribute)
                one = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
                one.command(cmd_name, short_help=summaries[cmd_name])(reported()(function))
                self.commands[cmd_name] = typer.main.get_command(one)
            return self.commands.get(cmd_name)

    return LazyGroup
