"""Conversations → token ids and their loss mask, by a model's own chat template.

A template renders as in transformers: Jinja2's immutable sandbox with the same settings, filters and globals. Learned
tokens are those of its `{% generation %}` blocks; without such blocks, what a turn adds to the turns before it.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from stepfs.errors import AbsentError, StepfsError, UsageError
from stepfs_producer.plan.arrays import Ids, Mask
from stepfs_producer.plan.sources import Chat, Tokenizer
from stepfs_producer.transforms.documents import ChatSpec, Encoded, TokenizerSpec, UnfitRecordError
from stepfs_producer.transforms.tokenizer import ModelTokenizer, load_tokenizer, longest_first

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_LEARNED: Final = "assistant"
_SYSTEM: Final = ("system", "developer")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
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
_CHARACTERS_MAX: Final = 4 << 20
_REASON_CHARACTERS: Final = 200
_BESIDE: Final = "tokenizer_config.json"
_MARK: Final = "\U0010fffd\U0010fffc"  # in a control token that a message spells; no filter changes it
_MARK_IN_JSON: Final = json.dumps(_MARK)[1:-1]
_NO_DATE: Final = "the template writes today's date; add date: 2026-01-01 to chat, so that each run writes the same"

Message = dict[str, Any]
Spans = list[tuple[int, int]]  # of characters


def template_of(tokenizer: Tokenizer, below: Callable[[str], str]) -> str:
    """The chat template: as given, of the file that is named, or of that beside the tokenizer's file."""
    given = tokenizer.chat_template
    if given is not None and "{" in given:
        return given
    if tokenizer.file is None:
        raise UsageError("chats need a model's tokenizer; add tokenizer: {kind: huggingface, file: tokenizer.json}")
    if given is not None:
        return _content(Path(below(given)))
    beside = Path(tokenizer.file).parent / "chat_template.jinja"
    if beside.exists():
        return _content(beside)
    found = _config(tokenizer).get("chat_template")
    if isinstance(found, list):  # by name
        found = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    if not isinstance(found, str):
        raise UsageError(
            f"no chat template beside {tokenizer.file} ({_BESIDE}, chat_template.jinja); add chat_template: FILE to tokenizer"
        )
    return found


def special_tokens(tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """What templates know as bos_token, eos_token and so on: of tokenizer_config.json beside the tokenizer's file."""
    found = {}
    for name, value in _config(tokenizer).items():
        if name.endswith("_token") and not name.startswith("add_"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return tuple(sorted(found.items()))


def _config(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.file is None:
        return {}
    path = Path(tokenizer.file).parent / _BESIDE
    if not path.exists():
        return {}
    try:
        found = json.loads(_content(path))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON ({error}); fetch it again") from error
    return found if isinstance(found, dict) else {}


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise AbsentError(f"{path}: no such chat template") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; name a readable chat template") from error


class Chats:
    """Conversations of one source. `UsageError` if the template is none."""

    def __init__(self, spec: ChatSpec, tokenizer: TokenizerSpec) -> None:
        found = load_tokenizer(tokenizer)
        if not isinstance(found, ModelTokenizer):
            raise UsageError("chats need a model's tokenizer; add tokenizer: {kind: huggingface, file: tokenizer.json}")
        self._spec, self._chat, self._tokenizer = spec, spec.chat, found
        self._template = Rendering(spec)
        self._as_text = tokenizer.tokenizer.control_tokens != "tokens"
        self._marked = re.compile("|".join(map(re.escape, [_MARK, *longest_first(found.control_tokens)])))

    def encode(self, record: object) -> Encoded:
        """Its token ids, 1 for those that are learned, and how it is cut if it is too long for a row.

        `UnfitRecordError` names what no conversation has.
        """
        if not isinstance(record, Mapping):
            raise UnfitRecordError("no object with messages")
        messages, tools = self.system_of(record) + conversation(record, self._chat), self.tools_of(record)
        ids, mask = self.rendered(messages, tools)
        if not mask.any():
            raise UnfitRecordError(
                f"no learned token; the roles are {_roles(messages)}, and learn is {self._chat.learn}"
            )
        if self._spec.tokens_max is None or len(ids) <= self._spec.tokens_max:
            return ids, mask, ()
        if self._spec.truncates:
            ends = [place + 1 for place, one in enumerate(messages) if _is_learned(one, self._chat)]
            _, kept = self._longest(messages, tools, 0, 0, ends)
            if kept is None:
                return ids, mask, ()
            size = len(kept[0])
            return np.append(kept[0], ids[size:]), np.append(kept[1], mask[size:]), (size,)
        return self._split(messages, tools)

    def _split(self, messages: list[Message], tools: object) -> Encoded:
        """Runs of whole exchanges, each behind the system's messages; those that fit nowhere stand last, and are lost."""
        head = next((place for place, one in enumerate(messages) if one["role"] not in _SYSTEM), len(messages))
        begins = [
            place
            for place in range(head + 1, len(messages))
            if messages[place]["role"] == "user" != messages[place - 1]["role"]
        ]
        ends = [*begins, len(messages)]
        kept: list[tuple[Ids, Mask]] = []
        lost: list[tuple[Ids, Mask]] = []
        begin = head
        while begin < len(messages):
            end, found = self._longest(messages, tools, head, begin, [end for end in ends if end > begin])
            if found is None:
                lost.append(self.rendered([*messages[:head], *messages[begin:end]], tools))
            else:
                (kept if found[1].any() else lost).append(found)
            begin = end
        ids, masks = zip(*kept, *lost, strict=True)
        return np.concatenate(ids), np.concatenate(masks), tuple(len(one) for one, _ in kept)

    def _longest(
        self, messages: list[Message], tools: object, head: int, begin: int, ends: Sequence[int]
    ) -> tuple[int, tuple[Ids, Mask] | None]:
        """The last of `ends` up to which messages from `begin` on fit behind the first `head`, with their ids; the first end and
        None, if none fits.
        """
        found: tuple[int, tuple[Ids, Mask] | None] = (ends[0], None)
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            one = self.rendered([*messages[:head], *messages[begin : ends[middle]]], tools)
            if len(one[0]) <= (self._spec.tokens_max or 0):
                found, low = (ends[middle], one), middle + 1
            else:
                high = middle
        return found

    def tools_of(self, record: Mapping[str, Any]) -> list[object] | None:
        tools = _parsed(record.get(self._chat.tools)) if self._chat.tools else None
        if tools is not None and not isinstance(tools, list):
            raise UnfitRecordError(f"no list in the field {self._chat.tools!r}")
        return tools

    def system_of(self, record: Mapping[str, Any]) -> list[Message]:
        text = record.get(self._chat.system) if self._chat.system else None
        return [{"role": "system", "content": text}] if text else []

    def messages_of(self, value: object, role: str) -> list[Message]:
        """Those of a list, or the one that a text is."""
        if isinstance(value, list):
            return [_message(number, one, self._chat) for number, one in enumerate(value)]
        return [{"role": role, "content": value}]

    def rendered(self, messages: list[Message], tools: object, *, answer: int = 0) -> tuple[Ids, Mask]:
        """The ids of messages, of which those from `answer` on may be learned."""
        learned = [place >= answer and _is_learned(message, self._chat) for place, message in enumerate(messages)]
        messages = [{key: value for key, value in one.items() if key != "train"} for one in messages]
        if self._as_text:
            messages, tools = self._marked_as_text(messages), self._marked_as_text(tools)
        text, spans = self._template.learned(messages, tools or None, learned, self._chat.learn)
        text, spans = self._spelled(text, spans)
        if len(text.encode(errors="replace")) > self._tokenizer.text_bytes_max:
            raise UnfitRecordError(f"a conversation of {len(text)} characters; this tokenizer takes fewer")
        return self._tokenizer.encode_rendered(text, [span for span in spans if span[0] < span[1]])

    def _marked_as_text(self, value: Any) -> Any:
        """The same, with a mark inside each control token that a text spells."""
        if isinstance(value, str):
            plain = value.replace(_MARK, "")
            return self._marked.sub(lambda found: found[0][:1] + _MARK + found[0][1:], plain)
        if isinstance(value, Mapping):
            return {key: self._marked_as_text(one) for key, one in value.items()}
        return [self._marked_as_text(one) for one in value] if isinstance(value, list) else value

    def _spelled(self, text: str, spans: Spans) -> tuple[str, Spans]:
        """The text without marks and with control tokens by the names that the tokenizer knows; spans follow."""
        pieces, places, shifts, last, shift = [], [0], [0], 0, 0
        for found in self._marked.finditer(text):
            name = self._tokenizer.control_tokens.get(found[0], "")
            pieces += [text[last : found.start()], name]
            last = found.end()
            shift += len(name) - len(found[0])
            places.append(last)
            shifts.append(shift)
        moved = [tuple(place + shifts[bisect(places, place) - 1] for place in span) for span in spans]
        return "".join([*pieces, text[last:]]), moved  # type: ignore[return-value]


@lru_cache(maxsize=8)
def chats(spec: ChatSpec, tokenizer: TokenizerSpec) -> Chats:
    return Chats(spec, tokenizer)


def _parsed(value: Any) -> Any:
    """Lists are JSON where a format has no lists of objects."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def conversation(record: Mapping[str, Any], chat: Chat) -> list[Message]:
    """The messages of a record, by the names of transformers. `UnfitRecordError`."""
    if chat.completion is None:
        messages = _parsed(record.get(chat.messages))
        if not isinstance(messages, list) or not messages:
            there = ", ".join(map(repr, list(record)[:8]))
            raise UnfitRecordError(f"no list of messages in the field {chat.messages!r}; it has {there or 'no field'}")
        found = [_message(number, one, chat) for number, one in enumerate(messages)]
    else:
        found = _pair(record, chat)
    return found


def _message(number: int, message: object, chat: Chat) -> Message:
    if not isinstance(message, Mapping):
        raise UnfitRecordError(f"message {number} is no object")
    role = message.get(chat.role)
    role = chat.roles.get(str(role), role)
    if role not in ROLES:
        raise UnfitRecordError(
            f"message {number} has the {chat.role} {role!r}, known: {', '.join(ROLES[:5])}; say what it is by roles: {{{role}: user}}"
        )
    rest = {key: value for key, value in message.items() if key not in (chat.role, chat.content) and value is not None}
    content = {"content": message[chat.content]} if chat.content in message else {}
    found = {"role": role, **content, **rest}
    reasoning = next((found[name] for name in _REASONING if found.get(name) is not None), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _pair(record: Mapping[str, Any], chat: Chat) -> list[Message]:
    """The messages of a record whose fields hold a prompt and its completion, as text or as messages."""
    assert chat.completion is not None
    assert chat.prompt is not None
    given = [record.get(name) for name in chat.prompt]
    completion = record.get(chat.completion)
    found: list[Message] = []
    for value in given:
        if isinstance(value, list):
            found += [_message(number, one, chat) for number, one in enumerate(value)]
    if texts := [value for value in given if isinstance(value, str) and value]:
        found.append({"role": "user", "content": "\n\n".join(texts)})
    if not found:
        raise UnfitRecordError(f"no prompt in the fields {', '.join(map(repr, chat.prompt))}")
    if isinstance(completion, list):
        return found + [_message(number, one, chat) for number, one in enumerate(completion)]
    if not isinstance(completion, str) or not completion:
        raise UnfitRecordError(f"no text in the field {chat.completion!r}")
    return [*found, {"role": "assistant", "content": completion}]


def _is_learned(message: Message, chat: Chat) -> bool:
    return message.get("train", True) is not False and (chat.learn == "all" or message["role"] == _LEARNED)


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(one["role"]) for one in messages[:8]) + (", …" if len(messages) > 8 else "")


@dataclass(slots=True)
class _Rendered:
    """The work that one rendering may still do, and what it has made."""

    ranges_left: int = _ITERATIONS_MAX
    rounds_left: int = _ROUNDS_MAX
    work_left: int = _WORK_MAX
    characters: int = 0
    blocks: Spans = field(default_factory=list)  # of {% generation %}

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


class Rendering:
    """A chat template. `UsageError` if it is none; `UnfitRecordError` for a conversation that it refuses."""

    def __init__(self, spec: ChatSpec) -> None:
        self._tokens = dict(spec.tokens)
        self._sandbox = _Sandbox(spec.chat.date)
        try:
            self._template = self._sandbox.from_string(spec.template)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", "?")
            raise UsageError(f"the chat template is none (line {line}: {error}); fetch it again") from error

    def learned(self, messages: list[Message], tools: object, learned: Sequence[bool], learn: str) -> tuple[str, Spans]:
        """The text of a conversation, and the spans of characters that are learned."""
        text = self._render(messages, tools, generation=False)
        blocks = self._sandbox.now.blocks
        if learn == "all" and all(learned):
            return text, [(0, len(text))]
        if blocks and learn != "all":
            turns = [
                is_learned for message, is_learned in zip(messages, learned, strict=True) if message["role"] == _LEARNED
            ]
            if len(blocks) == len(turns):
                blocks = [block for block, is_learned in zip(blocks, turns, strict=True) if is_learned]
            elif learn == "last" or not all(turns):
                raise UnfitRecordError(
                    f"the template has {len(blocks)} learned blocks for {len(turns)} assistant turns; give learn: assistant and no train"
                )
            return text, blocks[-1:] if learn == "last" else blocks
        wanted = [turn for turn, is_learned in enumerate(learned) if is_learned]
        return text, list(self._by_prefix(text, messages, tools, wanted[-1:] if learn == "last" else wanted))

    def _by_prefix(
        self, text: str, messages: list[Message], tools: object, turns: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """What each of these turns adds to the text of those before it."""
        for turn in turns:
            is_assistant = messages[turn]["role"] == _LEARNED
            before = self._render(messages[:turn], tools, generation=is_assistant) if turn or is_assistant else ""
            after = text if turn == len(messages) - 1 else self._render(messages[: turn + 1], tools, generation=False)
            if not (text.startswith(before) and text.startswith(after)):
                raise UnfitRecordError(
                    f"the template writes turn {turn} otherwise once later ones follow; give learn: last, or a template with "
                    "{% generation %} blocks"
                )
            yield len(before), len(after)

    def _render(self, messages: list[Message], tools: object, *, generation: bool) -> str:
        self._sandbox.now = _Rendered()
        given = {**self._tokens, "messages": messages, "tools": tools, "documents": None}
        try:
            return "".join(self._counted(self._template.generate(**given, add_generation_prompt=generation)))
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


class _Counting(NodeTransformer):
    """Loops count their rounds, and `~` what it joins."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.For:  # noqa: N802 - as Jinja names it
        self.generic_visit(node)
        node.iter = jinja2.nodes.Filter(node.iter, "_rounds", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        values = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(values, "_joined", [], [], None, None, lineno=node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounded in rounds and in what it makes, before it is made: a template may come from anybody."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, today: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.now = _Rendered()
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
        self.now.go_round()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            self._look_at(__obj.__name__, owner, (*args, *kwargs.values()))
        return self._made(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in ("translate", "format_map") and super().is_safe_attribute(obj, attr, value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.now.go_round()
            place = 1 if hasattr(function, "jinja_pass_arg") else 0
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
    return text.replace(_MARK_IN_JSON, _MARK)
