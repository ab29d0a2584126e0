"""An option, declared once: as the annotation of a command's parameter or of a dataclass's field.

    ranks: Annotated[tuple[int, ...] | None, Opt("--ranks", "ranks of this node", "0-7", parse=parse_ranks)] = None

The command's option, its help, its variable `STEPFS_RANKS`, if it has one, and the value's type derive from it (`cli.options`);
tests hold the manual's tables against it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Opt:
    """One option. `flag` may be a switch (`--prime/--no-prime`). `given` is the default as a user would write it. `environ`:
    its variable is read, for what units, manifests and pods set; never for what destroys, or is said of one call.
    """

    flag: str
    help: str
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None  # from text to the field's value; None: by the field's type
    given: str | None = None
    least: float | None = None
    most: float | None = None
    short: str | None = None  # such as `-i`
    environ: bool | None = None  # None: if a dataclass of a long-running command declares it


def variable(flag: str) -> str:
    """`STEPFS_RANKS` of `--ranks`."""
    return "STEPFS_" + flag.partition("/")[0].removeprefix("--").replace("-", "_").upper()


def declared(options: type) -> dict[str, tuple[type, Opt]]:
    """Field → its type and its option, for those fields of a dataclass that declare one."""
    hints = get_type_hints(options, include_extras=True)
    return {
        name: (hint.__origin__, opt)
        for name, hint in hints.items()
        for opt in getattr(hint, "__metadata__", ())
        if isinstance(opt, Opt)
    }
