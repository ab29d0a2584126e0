"""The set-up of both programs: plain help with the exit codes, `--version`, and a line for each unknown variable.

A lazy group imports only the commands that are called, or whose help is wanted: to import fifteen commands and to make
typer's parameters of them costs more than most commands take to run.
"""

import importlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from stepfs import __version__
from stepfs.cli.columns import printable
from stepfs.cli.failure import print_document, reported, say
from stepfs.cli.options import with_options

_PREFIX: Final = "STEPFS_"
_SETTINGS: Final = frozenset(  # variables that are no option: of the log, the stores, the systemd unit
    f"{_PREFIX}{name}" for name in ("DEBUG", "DIR", "LAKE", "LOG_DIR", "SSE", "SSE_KMS_KEY_ID")
)
# Kubernetes sets these for a service called stepfs, or stepfs-something.
_SERVICE: Final = re.compile(r"STEPFS_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


_CallError: Final[type[Any]] = typer.BadParameter.__mro__[1]  # of a wrong call, which typer does not export


class Program(TyperGroup):
    """A group of commands that says a wrong call in one line, as every other error."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _in_one_line() if args else nullcontext():  # without any it helps
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _in_one_line():
            return super().invoke(ctx)


@contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except _CallError as error:
        path, name = "stepfs", "stepfs"
        if error.ctx:  # `python -m` is in the path alone
            path, name = error.ctx.command_path, error.ctx.find_root().command.name or name
        what = " ".join(error.format_message().rstrip(".").split())
        line = printable(f"{what}; see `{path} --help`")
        say(f"{name}: {line}", logging.ERROR)
        if "--json" in sys.argv:
            print_document(line, error.exit_code)
        raise SystemExit(error.exit_code) from None


def _print_version(context: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{context.command.name} {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def new_program(name: str, about: str, exit_codes: str, group: type[TyperGroup] = Program) -> typer.Typer:
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
    def before_each_command(context: typer.Context, *, _version: _Version = False) -> None:
        for service in [one for one in os.environ if _SERVICE.fullmatch(one) and "://" in os.environ[one]]:
            del os.environ[service]  # STEPFS_METRICS_PORT=tcp://… is of a service called stepfs-metrics, and no option
        for line in unknown(os.environ, context):
            say(f"stepfs: {printable(line)}")

    return app


def lazy_group(package: str, summaries: Mapping[str, str]) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=…)`, which imports a command when it is called: `some-name` is function `some_name` of
    module `PACKAGE.some_name`.
    """

    class LazyGroup(Program):
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
                one.command(cmd_name, short_help=summaries[cmd_name])(reported()(with_options(function)))
                self.commands[cmd_name] = typer.main.get_command(one)
            return self.commands.get(cmd_name)

    return LazyGroup


def unknown(names: Iterable[str], context: typer.Context) -> Iterator[str]:
    """A message for each STEPFS_… variable that no command reads, with the nearest name. Values are not shown.

    A misspelt one would be ignored silently. The other commands are asked only for what this one does not know.
    """
    asked = {name for name in names if name.startswith(_PREFIX) and not _SERVICE.fullmatch(name)} - _SETTINGS
    if not asked or not (asked := asked - _variables(context.command, context, context.invoked_subcommand)):
        return
    known = _SETTINGS.union(*(_variables(group, context) for group in programs()))
    for name in sorted(asked - known):
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1)
        yield f"{name} is set and means nothing" + (f"; do you mean {near[0]}?" if near else "")


def programs() -> Iterator[Any]:
    """The programs that are installed together, which read the same variables."""
    from importlib import metadata

    for point in metadata.distribution("stepfs").entry_points.select(group="console_scripts"):
        yield typer.main.get_command(importlib.import_module(f"{point.module}.app").app)


def _variables(group: Any, context: typer.Context, only: str | None = None) -> set[str]:
    """The variables of a program's commands, or of one of them."""
    commands = [group.get_command(context, name) for name in ([only] if only else group.list_commands(context))]
    return {parameter.envvar for command in commands if command for parameter in command.params if parameter.envvar}
