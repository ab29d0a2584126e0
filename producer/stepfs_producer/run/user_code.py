"""`module:function` of the user: imported with the user's rights, in the command's own process.

Workers import transforms by themselves (`transforms.user`); here are the functions that the planner calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import reduce
from typing import Any

from stepfs.errors import UsageError


def function_of(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. `UsageError` if there is none, or its module does not import."""
    module, _, path = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{name}: its module needs {error.name!r}, which is not installed; install it"
            ) from error
        raise UsageError(
            f"{name}: no module {error.name!r}; put it beside the plan, install it, or set PYTHONPATH"
        ) from error
    except Exception as error:  # a user's module raises anything
        raise UsageError(
            f"{name}: importing it raised {type(error).__name__}: {error}; correct it"
        ) from error
    try:
        found = reduce(getattr, path.split("."), loaded)
    except AttributeError as error:
        raise UsageError(f"{name}: module {module!r} has no {path!r}; correct the name") from error
    if not callable(found):
        raise UsageError(f"{name}: {path!r} is no function; name one")
    return found
