"""A test that is one scenario: an async function, run by a function that makes its world and its clock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def scenario(run: Callable[..., object], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """`run(test, **options)` calls the test, with a `world` if it makes one; the other arguments are pytest's."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        def ran(**given: Any) -> None:
            run(functools.partial(test, **given), **options)

        parameters = inspect.signature(test).parameters.values()
        ran.__signature__ = inspect.Signature([each for each in parameters if each.name != "world"])  # type: ignore[attr-defined]
        ran.__name__, ran.__doc__, ran.__module__ = test.__name__, test.__doc__, test.__module__
        return ran

    return decorate
