"""The reference of the public names, from their docstrings: `.venv/bin/python scripts/lib/api_page.py` prints it.

Left out: members that only stepfs itself calls. Rejected: the page in the repository, which repeats every docstring; mkdocs
with mkdocstrings, 30 packages for one page that no server shows yet.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any, Final

import stepfs
import stepfs_producer
from stepfs import announce, errors
from stepfs_producer.plan.file.schema import help_of
from stepfs_producer.plan.part import Part, keys_of

_WIDTH: Final = 100
_SPECIAL: Final = {"__call__", "__getitem__", "__iter__", "__len__"}
_OF_STEPFS: Final = {
    "Lake.announce", "Lake.as_worker", "Lake.can_follow_to", "Lake.files", "Lake.holds", "Lake.known", "Lake.note", "Lake.object_of",
    "Lake.origin_cuts", "Lake.rest", "Lake.tie", "Producer.running", "ShuffledSteps.check_place", "StepDataset.lakes", "ShuffledSteps.announce", "ShuffledSteps.note_drawn",
    "ShuffledSteps.order", "ShuffledSteps.position", "ShuffledSteps.refuses", "StepDataset.fetch_in_order_of",
}  # fmt: skip
_HEAD: Final = """\
# API

The public names of both packages, made from their docstrings by `scripts/lib/api_page.py`. Every other module and name may
change with any version. A plan needs the extra `produce`, `torch.dump` the extra `torch`. Both packages have `__version__`.

    from stepfs import CheckpointHook, Lake, ShuffledSteps, StepDataset, StreamState, trace
    from stepfs_producer import Producer
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD, "## stepfs: reading\n"]
    for name in ("StepDataset", "ShuffledSteps", "Lake", "StreamState", "CheckpointHook"):
        parts += _class(f"stepfs.{name}", getattr(stepfs, name))
    parts += _function("stepfs.trace", stepfs.trace)
    for name in stepfs.torch.__all__:
        parts += _function(f"stepfs.torch.{name}", getattr(stepfs.torch, name))
    parts += ["## stepfs.announce: an order of steps\n", _beginning(announce)]
    parts += _functions(announce, "announce_steps", "announce_file", "announce_none")
    parts += ["## stepfs.errors\n", _beginning(errors), *_errors(), ""]
    parts += ["## stepfs_producer: writing\n"]
    parts += _class("stepfs_producer.Producer", stepfs_producer.Producer)
    parts += _class("stepfs_producer.AsyncProducer", stepfs_producer.AsyncProducer, members=False)
    parts += [
        "`Fenced` and `Sealed` are `stepfs.errors.FencedError` and `SealedError`.\n",
        "## stepfs_producer: plans\n",
    ]
    parts += _class("stepfs_producer.Plan", stepfs_producer.Plan)
    described: set[tuple[str, str | None]] = set()
    parts += _keys(stepfs_producer.Plan, described)
    parts += ["### stepfs_producer.Bad\n", _block("Bad(reason: str)"), f"{stepfs_producer.Bad.__doc__}\n"]
    for name in stepfs_producer.__all__:
        if name != "Plan" and _is_part(kind := getattr(stepfs_producer, name)):
            parts += [f"### stepfs_producer.{name}\n", f"{inspect.getdoc(kind)}\n", *_keys(kind, described)]
    parts += ["### stepfs_producer.PlanError\n", f"{inspect.getdoc(stepfs_producer.PlanError)}\n"]
    return "\n".join(parts).rstrip() + "\n"


def _class(title: str, kind: type, *, members: bool = True) -> Iterator[str]:
    yield f"### {title}\n"
    if members and not _is_part(kind):
        yield _block(_signature(kind.__name__, vars(kind)["__init__"]))
    yield f"{inspect.getdoc(kind)}\n"
    if members and "__init__" in vars(kind) and (made := inspect.getdoc(vars(kind)["__init__"])):
        yield f"{made}\n"
    for name in _members(kind) if members else []:
        member, said = getattr(kind, name), inspect.getdoc(getattr(kind, name))
        if isinstance(member, property):
            yield f"#### `{kind.__name__}.{name}`\n\n{said}\n"
        elif "\n" in (signature := _signature(f"{kind.__name__}.{name}", member)):
            yield f"#### `{kind.__name__}.{name}`\n\n{_block(signature)}\n{said}\n"
        else:
            yield f"#### `{signature}`\n\n{said}\n"


def _is_part(kind: object) -> bool:
    """Whether its keywords are keys of a plan file."""
    return isinstance(kind, type) and issubclass(kind, Part)


def _members(kind: type) -> Iterator[str]:
    """Those that the class itself defines and describes, in the order of the source."""
    for name, member in vars(kind).items():
        public = isinstance(member, FunctionType | property | classmethod) and (name[0] != "_" or name in _SPECIAL)
        if public and f"{kind.__name__}.{name}" not in _OF_STEPFS and inspect.getdoc(member):
            yield name


def _beginning(module: object) -> str:
    """The first paragraph of its docstring."""
    return (inspect.getdoc(module) or "").partition("\n\n")[0] + "\n"


def _functions(module: object, *names: str) -> Iterator[str]:
    for name in names:
        yield from _function(f"stepfs.announce.{name}", getattr(module, name))


def _function(title: str, function: Any) -> list[str]:
    return [
        f"### {title}\n",
        _block(_signature(function.__name__, function)),
        f"{inspect.getdoc(function)}\n",
    ]


def _block(code: str) -> str:
    return f"```python\n{code}\n```\n"


def _signature(name: str, function: Any) -> str:
    """In a line, or in one for each parameter."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    kinds = [each.kind for each in parameters]
    shown = [_unquoted(str(each)) for each in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    back = str(signature.return_annotation).strip("'")
    end = "" if function.__name__ == "__init__" else f" -> {back}"
    line = f"{name}({', '.join(shown)}){end}"
    return line if len(line) <= _WIDTH else f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){end}"


def _unquoted(parameter: str) -> str:
    """`name: 'str' = 'x'` → `name: str = 'x'`."""
    declared, equals, default = parameter.partition(" = ")
    return declared.replace("'", "") + equals + default


def _errors() -> Iterator[str]:
    yield "| error | is a | exit code | meaning, and what to do |\n|---|---|---|---|"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.StepfsError):
            bases = ", ".join(base.__name__ for base in kind.__bases__)
            said = " ".join((inspect.getdoc(kind) or "").split())
            yield f"| `{name}` | {bases} | {kind.exit_code} | {said} |"


def _keys(kind: type[Part], described: set[tuple[str, str | None]]) -> Iterator[str]:
    """A line for each keyword of a plan's part; those that an earlier part has described in one line."""
    said = help_of(kind)
    fields = {key.name: said.get(key.name) for key in keys_of(kind)}
    news = {key: said for key, said in fields.items() if (key, said) not in described}
    described.update(news.items())
    yield from (f"* `{key}`" + (f": {said}" if said else "") for key, said in news.items())
    if olds := [f"`{key}`" for key in fields if key not in news]:
        yield f"* as above: {', '.join(olds)}"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
