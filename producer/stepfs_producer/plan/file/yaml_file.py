"""YAML → plan, with the place of every mistake.

PyYAML composes the nodes and never constructs objects. Scalars stay text. Tags, merge keys and duplicate keys are
refused. An alias counts as often as it is used, so a small file cannot describe a large tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn

import yaml

from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.part import WrongPartError
from stepfs_producer.plan.values import PlanError, Problem, Where, path_text

NODES_MAX: Final = 100_000
DEPTH_MAX: Final = 32
BYTES_MAX: Final = 4 << 20
_MERGE: Final = "<<"

Tree = str | list[Any] | dict[str, Any]
Spot = tuple[int, int]  # line and column, from 1 on


class _TooMuchError(Exception):
    """The file is refused as a whole, for the reason in the message."""


class _Loader(yaml.BaseLoader):
    """Composes nodes: counted, and not deeper than a plan is."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.nodes = self.depth = 0
        self.tagged: list[Spot] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            self.tagged.append(_spot(event.start_mark))
        self.nodes += 1
        self.depth += 1
        if self.nodes > NODES_MAX or self.depth > DEPTH_MAX:
            _refuse_size(self.depth, event.start_mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refuse_size(depth: int, mark: yaml.Mark) -> NoReturn:
    line, column = _spot(mark)
    if depth > DEPTH_MAX:
        raise _TooMuchError(f"{line}:{column}: nested deeper than {DEPTH_MAX} levels; a plan is flatter")
    raise _TooMuchError(f"{line}:{column}: more than {NODES_MAX} values, aliases expanded; write a shorter plan")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan and where its parts stand in the file."""

    plan: Plan
    name: str
    places: Places

    def error(self, problems: list[Problem]) -> PlanError:
        """The problems with their places, for those that are found after reading."""
        return PlanError([_line(self.name, *one) for one in sorted(map(self.places.located, problems))])


class Places:
    """The lines of keys and values in a file."""

    def __init__(self) -> None:
        self.values: dict[Where, Spot] = {(): (1, 1)}
        self.keys: dict[Where, Spot] = {}
        self.problems: list[tuple[Spot, str]] = []
        self._nodes = 0

    def tree(self, node: yaml.Node, where: Where = ()) -> Tree:
        """The text under `node`; remembers the place of everything in it."""
        self._nodes += 1
        if self._nodes > NODES_MAX or len(where) > DEPTH_MAX:
            _refuse_size(len(where), node.start_mark)
        self.values[where] = _spot(node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self.tree(item, (*where, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        return str(node.value)

    def _mapping(self, node: yaml.MappingNode, where: Where) -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        for key, value in node.value:
            spot = _spot(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append((spot, "a key is a list or a mapping; write text"))
            elif key.value == _MERGE and key.style is None:
                self.problems.append((spot, "merge keys are not supported; write the keys out, or use defaults"))
            elif key.value in found:
                first = ":".join(map(str, self.keys[(*where, key.value)]))
                self.problems.append((spot, f"key {key.value!r} stands here twice (first at {first}); remove one"))
            else:
                self.keys[(*where, key.value)] = spot
                found[key.value] = self.tree(value, (*where, key.value))
        return found

    def located(self, problem: Problem) -> tuple[Spot, str]:
        """The problem behind its place and line: `mix[1]: …`."""
        spot, where = self._found(problem)
        shown = path_text(where)
        return spot, (f"{shown}: " if shown else "") + problem.what

    def _found(self, problem: Problem) -> tuple[Spot, Where]:
        """The place, and the path as it is in the file: a shorthand has fewer keys than its long form."""
        where: Where = ()
        for part in problem.where:
            if (*where, part) in self.values:
                where = (*where, part)
        if not problem.of_key or where not in self.keys:
            return self.values[where], where
        above = where[:-1]
        return self.keys[where], above[:-1] if above[-1:] == ("weights",) else above


def read_plan(data: bytes, name: str) -> PlanFile:
    """The plan in the bytes of a file called `name`. `PlanError` has a line for every mistake."""
    places = Places()
    try:
        tree, tagged = _composed(data, places)
    except (_TooMuchError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError([f"{name}:{_syntax_error(error, data)}"]) from None
    wrong = [(spot, "tags are not supported; write plain text") for spot in tagged] + places.problems
    try:
        plan = Plan.read(tree)
    except WrongPartError as error:
        wrong += map(places.located, error.problems)
    if wrong:
        raise PlanError([_line(name, *one) for one in sorted(dict.fromkeys(wrong))])
    return PlanFile(plan, name, places)


def _composed(data: bytes, places: Places) -> tuple[Tree, list[Spot]]:
    if len(data) > BYTES_MAX:
        raise _TooMuchError(f"1:1: {len(data)} bytes; a plan has at most {BYTES_MAX}")
    loader = _Loader(data.decode("utf-8-sig"))
    try:
        node = loader.get_single_node()
        return ({} if node is None else places.tree(node)), loader.tagged
    finally:
        loader.dispose()


def _syntax_error(error: Exception, data: bytes) -> str:
    if isinstance(error, UnicodeDecodeError):
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        return f"{line}:{column}: not UTF-8; save the file as UTF-8"
    if isinstance(error, yaml.reader.ReaderError):
        text = data.decode("utf-8-sig")[: error.position]
        line, column = text.count("\n") + 1, error.position - text.rfind("\n")
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return f"{line}:{column}: the character U+{code:04X} may not stand in YAML; remove it"
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        line, column = _spot(mark) if mark is not None else (1, 1)
        return f"{line}:{column}: no YAML: {error.problem or error.context}; correct the line, or quote its text"
    return str(error) if isinstance(error, _TooMuchError) else "1:1: nested too deeply; a plan is flatter"


def _line(name: str, spot: Spot, what: str) -> str:
    return f"{name}:{spot[0]}:{spot[1]}: {what}"


def _spot(mark: yaml.Mark) -> Spot:
    return mark.line + 1, mark.column + 1
