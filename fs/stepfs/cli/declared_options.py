"""A command takes the options that a dataclass declares, so that none is spelled a second time."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final

from stepfs.cli.options import opt
from stepfs.declared_option import Opt, declared

VALUES: Final = "values"  # the parameter of the command's function


def takes(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options to a command's function: its parameter `values` is a dict of fields and their values.

    Texts are parsed when the command runs, so that a wrong one is reported as any other error.
    """
    found = declared(options)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def called(**given: Any) -> None:
            values = {name: _value(each, given.pop(name)) for name, (_, each) in found.items()}
            command(**given, **{VALUES: values})

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [each for each in own if each.name != VALUES] + _parameters(options)
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
        called.__annotations__ = {}
        called.__name__, called.__doc__ = command.__name__, command.__doc__
        return called

    return decorate


def _value(option: Opt, given: Any) -> Any:
    return option.parse(given) if option.parse is not None and given is not None else given


def _parameters(options: type) -> list[inspect.Parameter]:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    parameters = []
    for name, (kind, each) in declared(options).items():
        shown = opt(each.flag, each.help, each.metavar, least=each.least, most=each.most)
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name] if each.parse is None else each.given,
                annotation=Annotated[kind if each.parse is None else str | None, shown],
            )
        )
    return parameters
