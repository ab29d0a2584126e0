"""Each message that the code can end with, found in its source: what an error of `stepfs.errors`, a mistake of a plan, a bad
record, a refusal of a volume or a finding of the doctor says.

A value is shown as `…`. A message that is put together elsewhere is looked up there: a name where it is assigned, a
parameter where the function is called, a call in what the function returns. Places where that is not enough are returned as
well: they pass on what another place, or a library, says.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from stepfs import errors
from stepfs_producer.plan.values import PlanError

ROOT: Final = Path(__file__).parents[3]
VALUE: Final = "…"
_HOMES: Final = ("fs/stepfs", "producer/stepfs_producer")
_VARIANTS_MAX: Final = 12  # of one message; more would be combinations that nobody sees
_DEPTH_MAX: Final = 4
_WORDS: Final = re.compile(r"[a-z]{3}")
# callable → the kind of its message, and the arguments that are it
_OTHERS: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "fail": ("doctor", (1, 2)),
    "note": ("doctor", (1, 2)),
    "RpcError": ("volume", (1,)),
    "Problem": (PlanError.__name__, (1,)),
    "UnfitRecordError": ("record", (0,)),
    "UnreadablePayloadError": ("record", (0,)),
}
_DOCTOR: Final = "fs/stepfs/doctor/"
# whose `ValueError` a command, or a plan, reports as a wrong value
_VALUES: Final = ("producer/stepfs_producer/plan/", "fs/stepfs/format/arguments", "fs/stepfs/format/mesh")


class Message(NamedTuple):
    """`text` with `…` for values; `kind`: a class of `stepfs.errors`, `PlanError`, `doctor`, `record` or `volume`."""

    kind: str
    text: str
    file: str

    @property
    def anchor(self) -> str:
        """Of its heading."""
        return "m-" + re.sub(r"[^a-z0-9]+", "-", self.text.lower()).strip("-")[:80].rstrip("-")


@dataclass(eq=False)
class _Scope:
    """A function, or a module, with what stands in it."""

    node: ast.AST
    module: ast.Module
    calls: list[ast.Call] = field(default_factory=list)
    assigned: defaultdict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))
    returned: list[ast.expr] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)  # name here → name where it is defined

    @property
    def parameters(self) -> list[str]:
        """Without `self`."""
        if not isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        found = self.node.args
        names = [one.arg for one in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
        return [name for name in names if name not in {"self", "cls"}]


class _Sources:
    """The modules, and what is defined in them by name."""

    def __init__(self, root: Path) -> None:
        self.scopes: list[tuple[str, _Scope]] = []
        self.modules: dict[int, _Scope] = {}
        self.functions: defaultdict[str, list[_Scope]] = defaultdict(list)
        self.callers: defaultdict[str, list[tuple[_Scope, ast.Call]]] = defaultdict(list)
        self.bases: dict[str, list[str]] = {}
        for home in _HOMES:
            for path in sorted((root / home).rglob("*.py")):
                self._read(str(path.relative_to(root)), ast.parse(path.read_text(encoding="utf-8")))

    def _read(self, file: str, module: ast.Module) -> None:
        whole = self.modules[id(module)] = _Scope(module, module)

        def walk(node: ast.AST, scope: _Scope) -> None:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    scope = _Scope(node, module)
                    self.scopes.append((file, scope))
                    self.functions[name].append(scope)
                case ast.ImportFrom(names=names):
                    scope.aliases |= {one.asname: one.name for one in names if one.asname}
                case ast.ClassDef(name=name, bases=bases):
                    self.bases[name] = [_name(base) for base in bases]
                case ast.Call(func=func):
                    scope.calls.append(node)
                    self.callers[_name(func)].append((scope, node))
                case ast.Return(value=value) | ast.Yield(value=value) if value is not None:
                    scope.returned.append(value)
            for target, value in _assignments(node):
                scope.assigned[_name(target)].append(value)
                if isinstance(target, ast.Attribute) and scope is not whole:
                    whole.assigned[_name(target)].append(value)
            for child in ast.iter_child_nodes(node):
                walk(child, scope)

        self.scopes.append((file, whole))
        walk(module, whole)

    def public(self, name: str) -> str:
        """The nearest class of `stepfs.errors` above an error of any module; '' for what is none."""
        waiting, seen = [name], set()
        while waiting:
            one = waiting.pop(0)
            kind = getattr(errors, one, None)
            if one == PlanError.__name__ or (isinstance(kind, type) and issubclass(kind, errors.StepfsError)):
                return one
            if one not in seen:
                seen.add(one)
                waiting += self.bases.get(one, [])
        return ""


def collected(root: Path = ROOT) -> tuple[list[Message], list[str]]:
    """(the messages in the order of their kinds, the places `FILE: CODE` whose message is not known)."""
    sources = _Sources(root)
    found: dict[tuple[str, str], Message] = {}
    unknown = []
    for file, scope in sources.scopes:
        for call in scope.calls:
            kind, places = _kind_of(sources, file, call)
            if not kind or not call.args or isinstance(call.args[0], ast.Starred):
                continue  # raised without a message, or made again of another error
            texts = _joined(call, places, _Reader(sources, scope))
            if not texts or not all(len(_WORDS.findall(text)) > 1 for text in texts):
                texts = _joined(call, places, _Reader(sources, scope, deep=True)) or texts
            least = min(2, max((len(_WORDS.findall(text)) for text in texts), default=0))
            texts = [text for text in texts if least and len(_WORDS.findall(text)) >= least]
            if not texts:
                unknown.append(f"{file}: {ast.unparse(call)}")
            for text in texts:
                found.setdefault((kind, text), Message(kind, text, file))
    return sorted(found.values()), unknown


def _kind_of(sources: _Sources, file: str, call: ast.Call) -> tuple[str, tuple[int, ...]]:
    """What a call makes, and which of its arguments are the message."""
    name = _name(call.func)
    if name in {"fail", "note"} and not file.startswith(_DOCTOR):
        return "", ()
    if name == "ValueError" and file.startswith(_VALUES):
        return errors.UsageError.__name__, (0,)
    return _OTHERS.get(name) or (sources.public(name), (0,))


def _joined(call: ast.Call, places: tuple[int, ...], reader: _Reader) -> list[str]:
    """Detail and remedy of a finding are one message, as the doctor prints them."""
    given = [call.args[at] for at in places if at < len(call.args)]
    parts = [reader.texts(one) or [VALUE] for one in given]
    return [*dict.fromkeys(_tidy(": ".join(one)) for one in product(*parts))][:_VARIANTS_MAX]


@dataclass(frozen=True)
class _Reader:
    """Of expressions in a scope. `deep`: values in a message are looked up, too."""

    sources: _Sources
    scope: _Scope
    deep: bool = False

    def texts(self, node: ast.expr, depth: int = 0) -> list[str]:
        """What the expression may say; empty if that is not known."""
        if depth > _DEPTH_MAX:
            return []
        match node:
            case ast.Constant(value=str() as text):
                return [text]
            case ast.JoinedStr(values=values):
                return _together([self._part(one, depth) for one in values])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _together([self.texts(one, depth) or [VALUE] for one in (left, right)])
            case ast.BinOp(left=left, op=ast.Mod()):
                return [re.sub(r"%[srdg]", VALUE, text) for text in self.texts(left, depth)]
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                return self._assigned(name, depth)
            case ast.Call():
                return self._called(node, depth)
        return [text for one in _choices(node) for text in self.texts(one, depth)]

    def _called(self, call: ast.Call, depth: int) -> list[str]:
        match call:
            case ast.Call(func=func, args=arguments) if _name(func) == "command":
                words = [one.value if isinstance(one, ast.Constant) else VALUE for one in arguments]
                return [" ".join(map(str, words))]
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str())), args=[inner]):  # "; ".join(…)
                return self.texts(inner, depth + 1)
            case ast.Call(func=ast.Attribute(value=table, attr="get"), args=[_, *rest]):
                return [text for one in (table, *rest) for text in self.texts(one, depth + 1)]
        return self._returned(_name(call.func), depth)

    def _part(self, node: ast.expr, depth: int) -> list[str]:
        """Of an f-string: words that depend on a condition, and a constant's, are words of the message."""
        if not isinstance(node, ast.FormattedValue):
            return self.texts(node, depth)
        inner = node.value
        if isinstance(inner, ast.IfExp):
            return [text for one in _choices(inner) for text in self.texts(one, depth + 1) or [VALUE]]
        is_command = isinstance(inner, ast.Call) and _name(inner.func) == "command"
        is_constant = isinstance(inner, ast.Name) and inner.id.isupper()
        return (self.texts(inner, depth + 1) if self.deep or is_command or is_constant else []) or [VALUE]

    def _assigned(self, name: str, depth: int) -> list[str]:
        """What is assigned to the name; of a parameter what the callers give."""
        for scope in (self.scope, self.sources.modules[id(self.scope.module)]):
            if found := [text for value in scope.assigned[name] for text in self.texts(value, depth + 1)]:
                return [*dict.fromkeys(found)]
        if name not in self.scope.parameters:
            return []
        at, found = self.scope.parameters.index(name), []
        for scope, call in self.sources.callers[getattr(self.scope.node, "name", "")]:
            given = [one.value for one in call.keywords if one.arg == name] or call.args[at : at + 1]
            found += [text for one in given for text in _Reader(self.sources, scope).texts(one, depth + 1)]
        return [*dict.fromkeys(found)]

    def _returned(self, name: str, depth: int) -> list[str]:
        found: list[str] = []
        name = self.sources.modules[id(self.scope.module)].aliases.get(name, name)
        for scope in self.sources.functions[name][:3]:
            inner = _Reader(self.sources, scope, self.deep)
            found += [text for value in scope.returned for text in inner.texts(value, depth + 1)]
        return [*dict.fromkeys(found)]


def _choices(node: ast.expr) -> list[ast.expr]:
    """Expressions of which the value is one."""
    match node:
        case ast.IfExp(body=body, orelse=other):
            return [body, other]
        case ast.BoolOp(values=values) | ast.Dict(values=values):
            return values
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return values
        case (
            ast.ListComp(elt=value)
            | ast.GeneratorExp(elt=value)
            | ast.Subscript(value=value)
            | ast.Starred(value=value)
        ):
            return [value]
    return []


def _together(parts: list[list[str]]) -> list[str]:
    """Of parts that each may say several things; of too many combinations each alternative beside the first of the others."""
    count = 1
    for one in parts:
        count *= len(one)
    if count <= _VARIANTS_MAX:
        return ["".join(one) for one in product(*parts)]
    firsts = [one[0] if one else "" for one in parts]
    return ["".join([*firsts[:at], text, *firsts[at + 1 :]]) for at, one in enumerate(parts) for text in one]


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _name(value)
    return ""


def _tidy(text: str) -> str:
    """One line; several values in a row are one."""
    return re.sub(rf"{VALUE}(\s*{VALUE})+", VALUE, " ".join(text.split()))
