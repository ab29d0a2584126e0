"""The commands of a program, which makes each at the first look at it."""

from __future__ import annotations

from typing import Any

import typer


def commands_of(app: typer.Typer) -> dict[str, Any]:
    """Name → click's command."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}
