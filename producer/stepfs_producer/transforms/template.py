"""A chat template, rendered as in transformers: Jinja2's immutable sandbox with the same settings, filters and globals.

Learned characters are those of its `{% generation %}` blocks; without such blocks, what a turn adds to the turns before it.
Where a turn stands is seen while the template loops over the messages: one rendering has all turns, where a rendering of
each beginning would cost the square of their number. That turns are written as they would be answered is looked at by
renderings of some beginnings: all of a short talk, of a long one the first and last turn of each kind.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial, wraps
from itertools import count, pairwise, takewhile
from threading import Lock
from typing import Any, Final, NamedTuple, NoReturn, cast

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from stepfs.errors import StepfsError, UsageError
from stepfs_producer.transforms.documents import ChatSpec, UnfitRecordError
from stepfs_producer.transforms.tokenizer import longest_first

Message = dict[str, Any]
Spans = list[tuple[int, int]]  # of characters

ANSWERS: Final = "assistant"  # the role whose turns are learned
MARK: Final = "\U0010fffd\U0010fffc"  # in a control token that a message spells; no filter changes it
_MARK_IN_JSON: Final = json.dumps(MARK)[1:-1]
_ITERATIONS_MAX: Final = 1 << 17  # of all ranges of a rendering
_ROUNDS_MAX: Final = 1 << 18  # of its loops and calls
_WORK_MAX: Final = 1 << 26  # characters and elements of all values that it makes
_REPEATED_MAX: Final = 1 << 16
_WIDTH_MAX: Final = 1 << 10
_OTHER: Final = 64  # characters, for what is no text
_PADDING: Final = frozenset(
    ("batch", "center", "expandtabs", "format", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap", "zfill")
)
_AS_TEXT: Final = frozenset(("format", "join", "pprint", "string", "tojson", "urlize", "xmlattr"))
_WIDE: Final = re.compile(r"\d{5}|\*")
_UNBOUNDED: Final = frozenset(("translate", "format_map"))
_OF_DICT: Final = frozenset(dir(dict))
_SAFE: Final[Mapping[type, frozenset[str]]] = {  # attributes that the sandbox would let pass
    jinja2.runtime.LoopContext: frozenset(one for one in dir(jinja2.runtime.LoopContext) if not one.startswith("_")),
    str: frozenset(one for one in dir(str) if not one.startswith("_")) - _UNBOUNDED - {"format"},
}
_CHARACTERS_MAX: Final = 4 << 20
_REASON_CHARACTERS: Final = 200
_SHORT: Final = 2  # learned turns, each of which is looked at
_KEPT: Final = 4  # renderings of beginnings: neighbours share some
_PROBE: Final = "stepfs"
_NO_DATE: Final = "the template writes today's date; add date: 2026-01-01 to chat, so that each run writes the same"


class Given(NamedTuple):
    """What a template gets beside the messages."""

    tools: list[object] | None = None
    variables: Mapping[str, Any] = {}
    images: tuple[int, ...] = ()  # tokens of each image that the messages show, which templates do not get


@dataclass(slots=True)
class _Rendered:
    """The work that one rendering may still do, and what it has made."""

    ranges_left: int = _ITERATIONS_MAX
    rounds_left: int = _ROUNDS_MAX
    work_left: int = _WORK_MAX
    characters: int = 0
    blocks: Spans = field(default_factory=list)  # of {% generation %}
    numbers: Mapping[int, int] = field(default_factory=dict)  # of messages, by identity
    begun: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # loop → messages that began, and where
    ended: dict[int, int] = field(default_factory=dict)

    def pieces(self, turns: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Where each message is written, if these are by one loop alone, in their order; else none."""
        found = []
        for loop, begun in self.begun.items():
            numbers, places = [one for one, _ in begun], [*(place for _, place in begun), self.ended.get(loop, 0)]
            if all(one < other for one, other in pairwise(numbers)):
                pieces = dict(zip(numbers, pairwise(places), strict=True))
                if all(begin < end for begin, end in (pieces.get(turn, (0, 0)) for turn in turns)):
                    found.append(pieces)
        return found[0] if len(found) == 1 else {}

    def go_round(self, rounds: int = 1) -> None:
        self.rounds_left -= rounds
        if self.rounds_left < 0:
            raise UnfitRecordError(f"the chat template goes round more than {_ROUNDS_MAX} times")

    def make(self, size: int) -> None:
        self.work_left -= size
        if self.work_left < 0:
            raise UnfitRecordError(f"the chat template makes values of more than {_WORK_MAX} characters")

    def size_as_text(self, *values: object) -> int:
        """Characters, at least as many as the values have as text. A value that holds itself many times is refused."""
        size, left = 0, list(values)
        while left:
            value = left.pop()
            if isinstance(value, str):
                size += len(value)
            else:
                size += _OTHER
                if isinstance(value, (list, tuple)):
                    left += value
                elif isinstance(value, Mapping):
                    left += value.values()
                    left += value
            if size > self.work_left:
                self.make(size)
        return size


@dataclass(slots=True)
class Looked:
    """What was looked at in the parts before, of a talk that is cut."""

    kinds: set[object] = field(default_factory=set)  # of turns
    alike: bool = True  # all are asked for by the same text


class Rendering:
    """A chat template. `UsageError` if it is none; `UnfitRecordError` for a conversation that it refuses."""

    def __init__(self, spec: ChatSpec, added: Iterable[str] = ()) -> None:
        """`added`: the tokenizer's added tokens, which are never parted."""
        self._added = re.compile("|".join(map(re.escape, longest_first(added))) or r"(?!)")
        self._tokens = {name: token for name, token in spec.tokens if token is not None}
        self._variables = spec.chat.template or {}
        self._sandbox = _Sandbox(spec.chat.date)
        defined = {name for name, _ in spec.tokens} | self._variables.keys()
        self._lock = Lock()  # threads of `check` share one, and a rendering is noted in one place
        self._closings = frozenset(("", *self._tokens.values()))  # some templates close a talk behind its last turn
        default, of_tools = spec.templates
        self._template = self._compiled(default, defined)
        self._with_tools = self._compiled(of_tools, defined) if of_tools else self._template

    def _compiled(self, template: str, defined: set[str]) -> jinja2.Template:
        try:
            names = meta.find_undeclared_variables(self._sandbox.parse(template))
            found = self._sandbox.from_string(template)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise UsageError(f"the chat template is none (line {line}: {error}); fetch it again") from error
        for name in sorted(names - defined):
            if name.endswith("_token"):  # it would be written as nothing, in each chat
                raise UsageError(
                    f"the chat template names {name}, which no file beside the tokenizer's defines; write the token, or null for "
                    f'none, into tokenizer_config.json there: {{"{name}": …}}'
                )
        return found

    def learned(
        self,
        messages: list[Message],
        given: Given,
        learned: Sequence[bool],
        *,
        blocks: bool,
        looked: Looked | None = None,
        most: float = math.inf,
    ) -> tuple[str, Spans, Mapping[int, tuple[int, int]]]:
        """The text of a conversation, the spans of characters that are learned (of its learned messages the
        `{% generation %}` blocks, unless not `blocks`, or else all; none of a text of more than `most` characters), and where
        messages are written, if that is known.
        """
        turns = [turn for turn, is_learned in enumerate(learned) if is_learned]
        with self._lock:
            text = self._render(messages, given)
            found, pieces = self._sandbox.now.blocks, self._sandbox.now.pieces(turns)
            if len(text) > most:
                return text, [], pieces
            if found and blocks:
                return text, _of_learned(found, pieces, messages, learned), pieces
            if all(learned) and not blocks:
                return text, [(0, len(text))], pieces
            beginning = lru_cache(_KEPT)(partial(self._beginning, messages, given))
            talk = _Talk(text, messages, beginning, self._closings, self._added)
            return text, talk.added_by(turns, pieces, looked or Looked()), pieces

    def _beginning(self, messages: list[Message], given: Given, count: int, *, generation: bool) -> str:
        return self._render(messages[:count], given, generation=generation)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether it renders a content that is a list of parts; else it would write Python's form of the list."""
        part = {"type": "text", "text": _PROBE}
        try:
            text = self.text_of([{"role": "user", "content": [part]}], Given())
        except UnfitRecordError:
            return False
        return _PROBE in text and "'type'" not in text

    def text_of(self, messages: list[Message], given: Given) -> str:
        with self._lock:
            return self._render(messages, given)

    def _render(self, messages: list[Message], given: Given, *, generation: bool = False) -> str:
        self._sandbox.now = _Rendered(numbers={id(message): number for number, message in enumerate(messages)})
        values = {**self._tokens, **self._variables, **given.variables, "tools": given.tools, "documents": None}
        template = self._with_tools if given.tools is not None else self._template
        try:
            pieces = template.generate(**{**values, "messages": messages, "add_generation_prompt": generation})
            return "".join(self._counted(pieces))
        except (UnfitRecordError, StepfsError, MemoryError):
            raise
        except Exception as error:  # of templates, and of Python inside them
            reason = " ".join(str(error).split())[:_REASON_CHARACTERS] or type(error).__name__
            raise UnfitRecordError(f"the chat template refuses the conversation ({reason})") from error

    def _counted(self, pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece
            self._sandbox.now.characters += len(piece)
            if self._sandbox.now.characters > _CHARACTERS_MAX:
                raise UnfitRecordError(f"the chat template writes more than {_CHARACTERS_MAX} characters")


@dataclass(frozen=True, slots=True)
class _Talk:
    """A rendered conversation, whose template does not say what is learned."""

    text: str
    messages: Sequence[Message]
    beginning: Callable[..., str]  # the rendering of so many messages; with `generation`, of the question for one more
    closings: frozenset[str]
    added: re.Pattern[str]

    def added_by(self, turns: Sequence[int], pieces: Mapping[int, tuple[int, int]], looked: Looked) -> Spans:
        """What each of these turns adds to the text of those before it, without what a template writes to ask for it."""
        if pieces:
            with suppress(UnfitRecordError):  # it may be one that writes a turn in several places
                return self._by_loop(turns, pieces, looked)
        return [self._without(self._head(turn, place), place) for turn in turns for place in [self._place(turn)]]

    def _by_loop(self, turns: Sequence[int], pieces: Mapping[int, tuple[int, int]], looked: Looked) -> Spans:
        last = len(self.messages) - 1
        if last in pieces:  # what closes the talk is the last turn's
            pieces = {**pieces, last: (pieces[last][0], len(self.text))}
        looked_at = _looked_at(turns, self.messages, self.text, pieces, looked)
        heads = {turn: self._head(turn, pieces[turn]) for turn in looked_at}
        looked.alike &= len({head for turn, head in heads.items() if self._is_asked_for(turn)}) < 2
        if not looked.alike:
            heads |= {turn: self._head(turn, pieces[turn]) for turn in turns if turn not in heads}
        usual = next((head for turn, head in heads.items() if self._is_asked_for(turn)), "")
        found = []
        for turn in turns:
            head = heads.get(turn, usual if self._is_asked_for(turn) else "")
            found.append(self._without(head, pieces[turn]))
        return found

    def _is_asked_for(self, turn: int) -> bool:
        return bool(self.messages[turn]["role"] == ANSWERS)

    def _without(self, head: str, place: tuple[int, int]) -> tuple[int, int]:
        """As trl, which takes the common beginning: some templates ask by `<think>`, with which not each answer begins."""
        begin, end = place
        if self.text.startswith(head, begin, end):
            return begin + len(head), end
        size = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(head, self.text[begin:end], strict=False)))
        parted = (one.start() for one in self.added.finditer(head) if one.start() < size < one.end())
        return begin + next(parted, size), end

    def _head(self, turn: int, place: tuple[int, int]) -> str:
        """What the template writes to ask for this turn. `UnfitRecordError` if it writes the turn otherwise than an answer to
        that.
        """
        begin, end = place
        head = ""
        if self._is_asked_for(turn):
            asked = self.beginning(turn, generation=True)
            self._compare(turn, asked, begin)
            head = asked[begin:]
        if turn + 1 < len(self.messages):
            alone = self.beginning(turn + 1, generation=False)
            self._compare(turn, alone, end)
            if alone[end:].strip() not in self.closings:
                self._compare(turn, "", end)
        return head

    def _place(self, turn: int) -> tuple[int, int]:
        """Where a turn stands, of a template that writes messages otherwise than one by one in a loop."""
        before = self.beginning(turn, generation=False) if turn else ""
        last = turn + 1 == len(self.messages)
        after = self.text if last else self.beginning(turn + 1, generation=False)
        self._compare(turn, before, len(before))
        self._compare(turn, after, len(after))
        return len(before), len(after)

    def _compare(self, turn: int, alone: str, size: int) -> None:
        if alone[:size] != self.text[:size]:
            raise UnfitRecordError(
                f"the template writes turn {turn} otherwise once later ones follow; give learn: last, or a template with "
                "{% generation %} blocks"
            )


def _of_learned(
    blocks: Spans, pieces: Mapping[int, tuple[int, int]], messages: Sequence[Message], learned: Sequence[bool]
) -> Spans:
    """The blocks of learned turns: a block a turn, or those that stand where a turn is written."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == ANSWERS]
    if all(learned[turn] for turn in turns):
        return blocks
    if len(blocks) == len(turns):
        return [block for block, turn in zip(blocks, turns, strict=True) if learned[turn]]
    if not pieces:
        raise UnfitRecordError(
            f"the template has {len(blocks)} learned blocks for {len(turns)} assistant turns; give learn: assistant and no train"
        )
    places = [pieces[turn] for turn in turns if learned[turn]]
    return [block for block in blocks if any(begin <= block[0] < end for begin, end in places)]


def _looked_at(
    turns: Sequence[int],
    messages: Sequence[Message],
    text: str,
    pieces: Mapping[int, tuple[int, int]],
    looked: Looked,
) -> Sequence[int]:
    """Turns by which all are judged: the first, and of each kind that is new the first and the last. A kind has the same keys,
    stands behind the same role, and is written whole, or is not.
    """
    if len(turns) <= _SHORT:
        return turns
    kinds: dict[object, list[int]] = {}
    for turn in turns:
        content = messages[turn].get("content")
        whole = isinstance(content, str) and content.strip() in text[slice(*pieces[turn])]
        kinds.setdefault((whole, messages[turn - 1]["role"], *sorted(messages[turn])), []).append(turn)
    new = kinds.keys() - looked.kinds
    looked.kinds |= new
    return sorted({turns[0], *(turn for kind in new for turn in (kinds[kind][0], kinds[kind][-1]))})


class _Generation(Extension):
    """`{% generation %}`: what it holds is learned."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_noted"), [], [], body).set_lineno(line)

    def _noted(self, caller: Callable[[], str]) -> str:
        text = caller()
        now = cast("_Sandbox", self.environment).now
        now.blocks.append((now.characters, now.characters + len(text)))
        return text


class _Loops(Extension):
    """Notes where loops write which message."""

    def note(self, name: str, *arguments: jinja2.nodes.Expr) -> jinja2.nodes.ExprStmt:
        return jinja2.nodes.ExprStmt(self.call_method(name, list(arguments)))

    def _begin(self, loop: int, message: object) -> None:
        now = cast("_Sandbox", self.environment).now
        number = now.numbers.get(id(message))
        if number is not None:
            now.begun.setdefault(loop, []).append((number, now.characters))

    def _end(self, loop: int) -> None:
        now = cast("_Sandbox", self.environment).now
        now.ended[loop] = now.characters


class _Counting(NodeTransformer):
    """Loops count their rounds and note their messages, and `~` counts what it joins."""

    def __init__(self, loops: _Loops) -> None:
        self._loops, self._numbers = loops, count()

    def visit_For(self, node: jinja2.nodes.For) -> list[jinja2.nodes.Node]:  # noqa: N802 - as Jinja names it
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, "_rounds", [], [], None, None, lineno=node.lineno)
        if not isinstance(node.target, jinja2.nodes.Name):
            return [node]
        loop = jinja2.nodes.Const(next(self._numbers))
        begin = self._loops.note("_begin", loop, jinja2.nodes.Name(node.target.name, "load"))
        node.body.insert(0, begin)
        found = [node, self._loops.note("_end", loop)]
        return [one.set_lineno(node.lineno) for one in found]

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        values = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(values, "_joined", [], [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounded in rounds and in what it makes, before it is made: a template may come from anybody."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, today: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, _Loops, loopcontrols])
        self.now = _Rendered()
        self._loops = cast("_Loops", self.extensions[_Loops.identifier])
        try:
            self._today = None if today is None else dt.date.fromisoformat(today)
        except ValueError as error:
            raise UsageError(f"the date {today} of chats is no day ({error})") from error
        self.filters["tojson"] = _to_json
        del self.filters["random"], self.globals["lipsum"]  # the same conversation is the same text
        self.filters = {name: self._bounded(name, one) for name, one in self.filters.items()}
        self.filters |= {"_rounds": self._rounds, "_joined": self._joined}
        self.finalize = self._finalized
        self.concat = self._joined  # type: ignore[method-assign]
        self.globals |= {
            "raise_exception": _raise_exception, "strftime_now": self._strftime_now, "range": self._bounded_range,
        }  # fmt: skip

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # most of a template
            self.now.make(len(left) + len(right))
            return left + right
        if operator == "%" and isinstance(left, str):
            self._look_at("format", left, (right,))
        elif operator in ("*", "**"):
            if isinstance(right, str | list | tuple):
                left, right = right, left
            size = right if operator == "**" else len(left) * right if isinstance(left, str | list | tuple) else 0
            if size > _REPEATED_MAX:
                raise UnfitRecordError(f"the chat template repeats {right} times")
        return self._made(super().call_binop(context, operator, left, right))

    def call(self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: PYI063 - as Jinja
        if getattr(__obj, "__self__", None) is self._loops:
            return __obj(*args)
        self.now.go_round()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            self._look_at(__obj.__name__, owner, (*args, *kwargs.values()))
        return self._made(super().call(__context, __obj, *args, **kwargs))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The same as Jinja's, which raises and catches an error for each key of a message."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICT:
                return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        elif attribute in _SAFE.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNBOUNDED and super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Counting(self._loops).visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.now.go_round()
            place = 1 if hasattr(function, "jinja_pass_arg") else 0
            if name == "join":  # of what `map` gives, too, whose length is not known
                args = (*args[:place], list(args[place]), *args[place + 1 :])
            self._look_at(name, args[place], (*args[place + 1 :], *kwargs.values()))
            return self._made(function(*args, **kwargs))

        return bounded

    def _look_at(self, name: str, value: Any, args: tuple[Any, ...]) -> None:
        """Refuse what would be long before it is made."""
        now = self.now
        if name in _PADDING and (wide := [one for one in args if isinstance(one, int) and one > _WIDTH_MAX]):
            raise UnfitRecordError(f"the chat template makes a text of {wide[0]} characters wide")
        if name == "replace" and len(args) > 1:
            now.make(str(value).count(str(args[0])) * len(str(args[1])))
        elif name in _AS_TEXT:
            times = len(value) + 1 if name == "join" else 1
            if name == "format":
                if _WIDE.search(value):
                    raise UnfitRecordError("the chat template formats a text wider than 9999 characters")
                times = value.count("%") + value.count("{") + 1
            now.make(times * now.size_as_text(*args) + now.size_as_text(value))

    def _made(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict):
            self.now.make(len(value))
        return value

    def _rounds(self, values: Any) -> list[Any]:
        found = list(values)
        self.now.go_round(len(found))
        return found

    def _joined(self, values: Iterable[Any]) -> str:
        found = [self._finalized(one) for one in values]
        self.now.make(sum(map(len, found)))
        return "".join(found)

    def _finalized(self, value: Any) -> str:
        if not isinstance(value, str):
            self.now.size_as_text(value)
        return str(value)

    def _bounded_range(self, *arguments: int) -> range:
        found = range(*arguments)
        self.now.ranges_left -= len(found)
        if self.now.ranges_left < 0:
            raise UnfitRecordError(f"the chat template goes round more than {_ITERATIONS_MAX} times")
        return found

    def _strftime_now(self, form: str) -> str:
        if self._today is None:
            raise UsageError(_NO_DATE)
        return self._today.strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_MARK_IN_JSON, MARK)
