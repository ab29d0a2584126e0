"""The small mistakes that one file can have: each changes one operator, number, condition or call."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_COMPARED: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_COUNTED: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
_OTHER_NAME: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SAID: Final = re.compile(r"^(_?log|logging|warnings)\.|^task_status\.|^super\(\)")  # and not done


@dataclass(frozen=True)
class Mutant:
    """One mistake: bytes [start, stop) of a file become `by`."""

    path: str
    line: int
    within: str  # the function or class
    was: str  # the first line of what is changed
    column: int
    what: str
    start: int
    stop: int
    by: str

    @property
    def name(self) -> str:
        """The same as long as its function and its line stand."""
        return f"{self.path} {self.within}: {self.was}: {self.what} at {self.column}"

    @property
    def rank(self) -> str:
        """An order that has nothing to do with the code."""
        return hashlib.sha256(self.name.encode()).hexdigest()

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.by.encode() + source[self.stop :]


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """All of a file, in the order of its lines; each can be compiled."""
    for mutant in _Changes(path, source).found():
        try:
            compile(mutant.applied(source), path, "exec")
        except (SyntaxError, SyntaxWarning):
            continue
        yield mutant


class _Changes:
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        yield from self._within(ast.parse(self._source), "")

    def _within(self, node: ast.AST, name: str) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}".lstrip(".")
        if _is_left_alone(node):
            return
        for change in self._of_node(node):
            start, stop, by = change
            line = self._line_of(start)
            whole = self._lines[line].decode()
            column = start - self._begins[line] - (len(whole) - len(whole.lstrip()))
            what = f"{self._source[start:stop].decode()} → {by}"
            yield Mutant(self._path, line + 1, name or "module", whole.strip(), column, what, start, stop, by)
        for field, value in ast.iter_fields(node):
            if field in {"annotation", "returns", "decorator_list", "type_params", "format_spec"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._within(child, name)

    def _of_node(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        yield from self._of_operator(node)
        yield from self._of_value(node)

    def _of_operator(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARED:
                yield from self._operator(left, right, *_COMPARED[type(op)])
            case ast.BoolOp(op=op, values=[left, right]):
                both = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                yield from self._operator(left, right, *both)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _COUNTED and not _is_text(left, right):
                yield from self._operator(left, right, *_COUNTED[type(op)])
            case ast.AugAssign(target=left, op=op, value=right) if type(op) in _COUNTED and not _is_text(right):
                was, by = _COUNTED[type(op)]
                yield from self._operator(left, right, f"{was}=", f"{by}=")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._begin(node), self._begin(operand), ""

    def _of_value(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Constant(value=bool(value)):
                yield self._begin(node), self._end(node), str(not value)
            case ast.Constant(value=int(value)):
                yield self._begin(node), self._end(node), str(value + 1)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if isinstance(
                test, ast.Name | ast.Call | ast.Attribute
            ):
                text = self._source[self._begin(test) : self._end(test)].decode()
                yield self._begin(test), self._end(test), f"not ({text})"
            case ast.Call(func=ast.Name(id=name) as func) if name in _OTHER_NAME:
                yield self._begin(func), self._end(func), _OTHER_NAME[name]
            case ast.Expr(value=ast.Call() | ast.Await()):
                text = self._source[self._begin(node) : self._end(node)].decode()
                if not _SAID.match(text.removeprefix("await ")):
                    yield self._begin(node), self._end(node), "pass"

    def _operator(self, left: ast.expr, right: ast.expr, was: str, by: str) -> Iterator[tuple[int, int, str]]:
        start, stop = self._end(left), self._begin(right)
        words = rf"\b{was}\b".replace(" ", r"\s+") if was[0].isalpha() else re.escape(was)
        found = re.search(words.encode(), self._source[start:stop])
        if found is not None:
            yield start + found.start(), start + found.end(), by

    def _line_of(self, offset: int) -> int:
        low, high = 0, len(self._lines)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._begins[middle] <= offset else (low, middle)
        return low

    def _begin(self, node: ast.expr | ast.stmt) -> int:
        return self._begins[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._begins[node.end_lineno - 1] + node.end_col_offset


def _is_left_alone(node: ast.AST) -> bool:
    """Words for people, claims of the code, and what only type checkers read."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Subscript(value=ast.Name(id=name)):
            return name in {"Literal", "Annotated", "Final", "Callable"}
        case ast.Call(func=ast.Attribute(value=ast.Name(id="_log" | "tracing"))):
            return True
    return False


def _is_text(*values: ast.expr) -> bool:
    return any(isinstance(value, ast.JoinedStr) or _is_constant_text(value) for value in values)


def _is_constant_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str | bytes)
