"""Options of commands, each declared once by an `Opt`, and arguments that several commands share.

A parameter of a command's function may carry an `Opt`, or a dataclass whose fields do: `values: Annotated[dict[str, Any],
MountOptions]` gets its fields. A LAKE is recognised by its scheme (`file://`, `s3://`); an argument without one is a
directory.
"""

import dataclasses
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any

import typer

from stepfs._internal.declared_option import Opt, declared, variable
from stepfs.cli.failure import expect_document

EndpointUrl = Annotated[
    str | None,
    Opt(
        "--endpoint-url",
        "S3-compatible server to use instead of what the AWS settings say (AWS_ENDPOINT_URL_S3, profile).",
        "URL",
        environ=True,
    ),
]
Json = Annotated[bool, Opt("--json", "Print one JSON document.")]
PlanDirectory = Annotated[
    str, Opt("--plan-dir", "Where the plan's file was: relative names in it are below, and modules of yours.", "DIR")
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it. Texts are parsed when it runs, so that a wrong one is reported as any other error."""
    parameters: list[Parameter] = []
    parsed: dict[str, Callable[[str], Any]] = {}
    groups: dict[str, list[str]] = {}
    for each in inspect.signature(command, eval_str=True).parameters.values():
        found = [(each, one) for one in getattr(each.annotation, "__metadata__", ())]
        if found and dataclasses.is_dataclass(options := found[0][1]) and isinstance(options, type):
            found = [*_fields(options)]
            groups[each.name] = [parameter.name for parameter, _ in found]
        for parameter, one in found:
            if not isinstance(one, Opt):
                parameters.append(parameter)
                continue
            if one.parse is not None:
                parsed[parameter.name] = one.parse
            parameters.append(_typed(parameter, one, environ=bool(groups) and each.name in groups))
        if not found:
            parameters.append(each)

    def called(**given: Any) -> None:
        expect_document(bool(given.get("as_json")))
        for name, parse in parsed.items():
            given[name] = None if given[name] is None else parse(given[name])
        for name, fields in groups.items():
            given[name] = {field: given.pop(field) for field in fields}
        command(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    called.__annotations__ = {}
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called


def _fields(options: type) -> list[tuple[Parameter, Opt]]:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return [
        (Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=Annotated[kind, each]), each)
        for name, (kind, each) in declared(options).items()
    ]


def _typed(parameter: Parameter, option: Opt, *, environ: bool) -> Parameter:
    flags = [option.flag, option.short] if option.short else [option.flag]
    shown = typer.Option(
        *flags,
        envvar=variable(option.flag) if (environ if option.environ is None else option.environ) else None,
        metavar=option.metavar,
        help=option.help,
        min=option.least,
        max=option.most,
    )
    kind = parameter.annotation.__origin__
    if option.parse is None:
        return parameter.replace(annotation=Annotated[kind, shown])
    return parameter.replace(annotation=Annotated[str | None, shown], default=option.given)


def not_empty(name: str | None) -> str | None:
    """An empty word, such as a variable that is not set, is no path: it would be the current directory."""
    if name == "":
        raise typer.BadParameter("the name is empty; name a lake by its URL, or a path")
    return name


Lake = Annotated[
    str, typer.Argument(metavar="LAKE", help="URL of the lake: file:///dir or s3://bucket/prefix.", callback=not_empty)
]
LakeOrDirectory = Annotated[
    str, typer.Argument(metavar="LAKE|DIR", help="URL of a lake, or directory it is mounted on.", callback=not_empty)
]
# A string: typer stats a `Path`, and a mount that hangs would hang the command.
Directory = Annotated[
    str, typer.Argument(metavar="DIR", help="The mount point: an empty directory.", callback=not_empty)
]
