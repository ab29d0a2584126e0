"""Conversations → token ids and their loss mask, by a model's own chat template.

Messages come to the template as transformers would give them: a key that is null was never there, a control token that a
message spells is text. What is learned of a turn says the template (`transforms.template`); which turns, the record and the
plan.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from stepfs.errors import UsageError
from stepfs_producer.plan.arrays import Ids, Mask
from stepfs_producer.plan.sources import VARIABLES, Chat
from stepfs_producer.transforms.documents import ChatSpec, Encoded, TokenizerSpec, UnfitRecordError, field_at, truth_of
from stepfs_producer.transforms.images import Image, columns_of
from stepfs_producer.transforms.template import ANSWERS, MARK, Given, Looked, Message, Rendering, Spans
from stepfs_producer.transforms.tokenizer import UNSPELLED, ModelTokenizer, Tokens, load_tokenizer, longest_first

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_SYSTEM: Final = ("system", "developer")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_RESERVED: Final = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
# What tools call the field of a message that says whether it is learned. `masked` says that it is not.
_SAYS_WHETHER: Final = ("train", "weight", "training", "trainable", "loss", "loss_mask", "masked")
_SAYS_NOT: Final = "masked"
_OF_PARTS: Final = ("train_detail", "training_detail", "loss_scale")  # of characters of a message, or no yes and no
_MEDIA: Final = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio")
_SURELY: Final = 64  # tokens more than a row has, by a guess: such a part need not be rendered
_ALIKE: Final = 8  # the same, where the guess was right for a part with one exchange less
_CHARACTERS: Final = 5  # of a token: a text with more is likely longer than a row, and cut before it is looked at
_PROBES: Final = ("stepfs asks", "stepfs answers", "stepfs goes on")


class Turn(NamedTuple):
    """A message as templates get it, and whether what the template writes of it may be learned."""

    message: Message
    learned: bool


class Ending(NamedTuple):
    """The token with which generation stops behind an answer; None: the template writes none."""

    token: str | None
    learned: bool


class Chats:
    """Conversations of one source. `UsageError` if the template is none."""

    def __init__(self, spec: ChatSpec, tokenizer: TokenizerSpec) -> None:
        found = load_tokenizer(tokenizer)
        if not isinstance(found, ModelTokenizer):
            raise UsageError("chats need a model's tokenizer; add tokenizer: {kind: huggingface, file: tokenizer.json}")
        self._spec, self._chat, self._tokenizer = spec, spec.chat, found
        self._template = Rendering(spec, found.added)
        self._heads: dict[str, Tokens] = {}  # what stands before a part of a talk that is cut
        self._as_text = tokenizer.tokenizer.control_tokens != "tokens"
        self._marked = re.compile("|".join(map(re.escape, [MARK, *longest_first(found.control_tokens)])))
        self._image = None if spec.images is None else spec.images.placeholder
        named = [("image", self._image)] if self._image else []
        for role, name in [*named, *(("stop", one) for one in spec.chat.stop or ())]:
            found.id_of(role, name)
            if name not in found.control_tokens:
                raise UsageError(f"the {role} token {name!r} is no control token of {tokenizer.file}; name one that is")

    def encode(self, record: object) -> Encoded:
        """Its token ids, 1 for those that are learned, and how it is cut if it is too long for a row.

        `UnfitRecordError` names what no conversation has.
        """
        if not isinstance(record, Mapping):
            raise UnfitRecordError("no object with messages")
        talk, given = [*self.system_of(record), *conversation(record, self._chat)], self.given_of(record)
        if self._chat.learn == "last":
            last = max((place for place, turn in enumerate(talk) if turn.learned), default=None)
            talk = [turn._replace(learned=place == last) for place, turn in enumerate(talk)]
        talk, given = self.prepared(talk, given)
        room = self._spec.tokens_max
        whole, mask, begins = self._sized(talk, given, math.inf if room is None else room * _CHARACTERS)
        if room is not None and not mask.any() and len(mask) <= room:
            whole, mask, begins = self._sized(talk, given)
        found = Encoded(whole.ids, mask, columns=columns_of(self._images_of(record)))
        if room is not None and len(mask) > room:
            cut = _Cut(talk, given, self, room, whole, begins)
            found = cut.truncated() if self._spec.truncates else cut.split()
        assert found.mask is not None
        if not found.mask.any():
            raise UnfitRecordError(f"no learned token; the roles are {_roles(talk)}, and learn is {self._chat.learn}")
        return found

    def given_of(self, record: Mapping[str, Any]) -> Given:
        """What the record gives the template beside its messages."""
        tools = _parsed(field_at(record, self._chat.tools)) if self._chat.tools else None
        if tools is not None and not isinstance(tools, list):
            raise UnfitRecordError(f"no list in the field {self._chat.tools!r}")
        variables = _parsed(record.get(VARIABLES))
        if variables is None:
            variables = {}
        if not isinstance(variables, Mapping) or (taken := _RESERVED & variables.keys()):
            what = "no object" if not isinstance(variables, Mapping) else f"{min(taken)!r}"
            raise UnfitRecordError(f"{what} in the field {VARIABLES!r}; it holds the template's own variables by name")
        known = {name: value for name, value in variables.items() if value is not None}
        merged = 1 if self._spec.images is None else self._spec.images.merge**2
        images = tuple(len(one.pixels) // merged for one in self._images_of(record))
        return Given([_parsed(one) for one in tools] if tools else None, known, images)

    def _images_of(self, record: Mapping[str, Any]) -> list[Image]:
        found: list[Image] = []
        for value in [] if self._spec.images is None else map(record.get, self._spec.images.fields):
            found += value if isinstance(value, list) else [] if value is None else [value]
        return found

    def system_of(self, record: Mapping[str, Any]) -> list[Turn]:
        text = field_at(record, self._chat.system) if self._chat.system else None
        return [Turn({"role": "system", "content": text}, self._chat.learn == "all")] if text else []

    def messages_of(self, value: object, role: str) -> list[Turn]:
        """Those of a list, or the one that a text is."""
        if isinstance(value, list):
            return _turns(value, self._chat)
        return [Turn({"role": role, "content": value}, role == ANSWERS or self._chat.learn == "all")]

    def prepared(self, talk: Sequence[Turn], given: Given) -> tuple[list[Turn], Given]:
        """The same as a template gets it: with parts as one text, and marks in what is text."""
        messages = [self._joined(*one) for one in enumerate(talk)]
        if self._as_text:
            messages, given = self._marked_as_text(messages), Given(*map(self._marked_as_text, given))
        return [turn._replace(message=message) for turn, message in zip(talk, messages, strict=True)], given

    def rendered(
        self,
        talk: Sequence[Turn],
        given: Given,
        *,
        masked: bool = True,
        looked: Looked | None = None,
        known: Callable[[str], Tokens | None] | None = None,
    ) -> tuple[Ids, Mask]:
        """The ids of a conversation, which is `prepared`, and 1 for those that are learned; 0 for all, if not `masked`."""
        text, spans, _ = self._written(talk, given, masked=masked, looked=looked)
        tokens, spans = self._encoded(text, spans, given.images, known)
        return tokens.ids, _mask(len(tokens.ids), tokens.places(spans))

    def _sized(self, talk: Sequence[Turn], given: Given, most: float = math.inf) -> tuple[Tokens, Mask, Spans | None]:
        """The same, and where each turn begins, and the last ends: the token, and the character; None: the template does not
        write them one by one. The mask is 0 for all, if there are more than `most` characters.
        """
        text, spans, pieces = self._written(talk, given, most=most)
        turns = [pieces.get(turn, (0, 0)) for turn in range(len(talk))]
        tokens, moved = self._encoded(text, [*spans, *turns], given.images)
        places = tokens.places(moved)
        begins = [
            (first, moved[len(spans) + turn][0]) for turn, (first, last) in enumerate(places[len(spans) :]) if last
        ]
        mask = _mask(len(tokens.ids), places[: len(spans)])
        if self._image is not None:
            mask[tokens.ids == self._tokenizer.id_of("image", self._image)] = 0
        return tokens, mask, [*begins, (len(mask), len(tokens.text))] if len(begins) == len(talk) else None

    def _encoded(
        self, text: str, spans: Spans, images: Sequence[int], known: Callable[[str], Tokens | None] | None = None
    ) -> tuple[Tokens, Spans]:
        """The tokens of a text with marks, of which some may be `known`, and the spans there."""
        if UNSPELLED in text.replace(MARK, ""):
            raise UnfitRecordError("a text with the name that only this program has for control tokens")
        own = self._tokenizer.by_own_names and MARK not in text
        if self._image is not None and (shown := text.count(self._image)) != len(images):
            raise UnfitRecordError(
                f"the messages show {shown} images by {self._image}, and the record has {len(images)}; each stands in them as "
                "a part {type: image}"
            )
        if not own or images:
            text, spans = self._spelled(text, spans, own=own, images=images)
        if len(text.encode(errors="replace")) > self._tokenizer.text_bytes_max:
            raise UnfitRecordError(f"a conversation of {len(text)} characters; this tokenizer takes fewer")
        return (known and known(text)) or self._tokenizer.encode_rendered(text, own=own), spans

    def joined(self, head: str, whole: Tokens, begin: tuple[int, int], end: tuple[int, int]) -> Tokens | None:
        """The tokens of a text that goes on behind `head` as `whole` does from `begin` to `end` (token and character). None:
        they may be others, for one of the three does not part at a control token.
        """
        parts = self._tokenizer.parts_texts and all(
            place == len(whole.text) or (whole.text.startswith(UNSPELLED, place) and whole.offsets[token, 0] == place)
            for token, place in (begin, end)
        )
        if not parts:
            return None
        before, kept = self._heads.get(head), slice(begin[0], end[0])
        if before is None:
            before = self._tokenizer.encode_rendered(head)
            self._heads = {head: before}  # of threads, too, which share this
        offsets = np.concatenate([before.offsets, whole.offsets[kept] + len(head) - begin[1]])
        text = head + whole.text[begin[1] : end[1]]
        return Tokens(text, np.concatenate([before.ids, whole.ids[kept]]), offsets)

    def _written(
        self,
        talk: Sequence[Turn],
        given: Given,
        *,
        masked: bool = True,
        looked: Looked | None = None,
        most: float = math.inf,
    ) -> tuple[str, Spans, Mapping[int, tuple[int, int]]]:
        """The text of a conversation with marks, the spans of characters that are learned, and where turns are written."""
        messages, learned = [turn.message for turn in talk], [turn.learned for turn in talk]
        spans: Spans = []
        pieces: Mapping[int, tuple[int, int]] = {}
        if masked:
            blocks = self._chat.learn != "all"
            text, spans, pieces = self._template.learned(
                messages, given, learned, blocks=blocks, looked=looked, most=most
            )
        else:
            text = self._template.text_of(messages, given)
        if stop := self._chat.stop:
            spans = [(begin, end + _size(text, end, stop)) for begin, end in spans]
            if learned[-1] and not text.rstrip().endswith(stop):
                text += stop[0]
                spans.append((len(text) - len(stop[0]), len(text)))
        return text, spans, pieces

    def ending(self) -> Ending | None:
        """How answers end, by the rendering of a short talk; None: the template refuses it."""
        ask, answer, more = _PROBES
        talk = [*self.messages_of(ask, "user"), *self.messages_of(answer, ANSWERS), *self.messages_of(more, "user")]
        try:
            alone, spans, _ = self._written(talk[:2], Given())
            among = self._template.text_of([turn.message for turn in talk], Given())
        except UnfitRecordError:
            return None
        behind = alone.find(answer) + len(answer)
        follows = among.find(answer) + len(answer)
        token = self._tokenizer.spelled(alone[behind:])
        if token is None:
            return Ending(self._tokenizer.spelled(among[follows : among.find(more)]), learned=False)
        place = alone.find(token, behind)
        return Ending(token, any(begin <= place < end for begin, end in spans))

    def _joined(self, number: int, turn: Turn) -> Message:
        """The message with its parts as one text, unless the template takes parts."""
        content = turn.message.get("content")
        if not isinstance(content, list):
            return turn.message
        for medium in filter(None, map(_medium_of, content)):
            if medium != "image" or self._image is None:
                way = "name the field of the images by images: FIELD beside chat (Parquet, Arrow, WebDataset), or "
                raise UnfitRecordError(
                    f"message {number} has a part of type {medium}, which is no text; {way if medium == 'image' else ''}leave the "
                    "part out"
                )
        if self._template.takes_parts:
            return turn.message
        texts: list[str] = []
        for one in content:
            text = one.get("text") if isinstance(one, Mapping) else one
            if isinstance(text, str):
                texts.append(text)
            else:
                kind = one.get("type") if isinstance(one, Mapping) else type(one).__name__
                raise UnfitRecordError(
                    f"message {number} has a part of type {kind}, and this chat template writes text alone; leave the part out"
                )
        return {**turn.message, "content": "".join(texts)}

    def _marked_as_text(self, value: Any) -> Any:
        """The same, with a mark inside each control token that a text spells."""
        if isinstance(value, str):
            plain = value.replace(MARK, "")
            return self._marked.sub(lambda found: found[0][:1] + MARK + found[0][1:], plain)
        if isinstance(value, Mapping):
            return {key: self._marked_as_text(one) for key, one in value.items()}
        return [self._marked_as_text(one) for one in value] if isinstance(value, list) else value

    def _spelled(self, text: str, spans: Spans, *, own: bool, images: Sequence[int]) -> tuple[str, Spans]:
        """The text without marks and with control tokens by the names that the tokenizer knows, images as often as they have
        tokens; spans follow.
        """
        pieces, places, shifts, last, shift = [], [0], [0], 0, 0
        counts = iter(images)
        for found in self._marked.finditer(text):
            name = found[0] if own else self._tokenizer.control_tokens.get(found[0], "")
            if found[0] == self._image:
                name *= next(counts)
            pieces += [text[last : found.start()], name]
            last = found.end()
            shift += len(name) - len(found[0])
            places.append(last)
            shifts.append(shift)
        moved = [tuple(place + shifts[bisect(places, place) - 1] for place in span) for span in spans]
        return "".join([*pieces, text[last:]]), moved  # type: ignore[return-value]


class _Cut:
    """A conversation that is longer than a row, between its turns."""

    def __init__(
        self,
        talk: Sequence[Turn],
        given: Given,
        chats: Chats,
        tokens_max: int,
        whole: Tokens,
        begins: Spans | None,
    ) -> None:
        """`begins`: see `Chats._sized`."""
        self._talk, self._given, self._chats, self._tokens_max, self._whole = talk, given, chats, tokens_max, whole
        self._begins, size = begins, len(whole.ids)
        # A good guess at the tokens of a part saves renderings.
        self._sizes = [size * turn // len(talk) for turn in range(len(talk) + 1)]
        if begins is not None:
            self._sizes = [token for token, _ in begins]
        self._surely = _SURELY if begins else size
        self._looked = Looked()

    def truncated(self) -> Encoded:
        """The longest beginning that fits and ends with a learned turn, and the rest, which is lost; all, if none fits."""
        kept = self.longest(0, 0, [place + 1 for place, turn in enumerate(self._talk) if turn.learned])[1]
        if kept is None:
            return Encoded(*self._chats.rendered(self._talk, self._given))
        ids, mask = kept
        lost = self._whole.ids[len(ids) :]
        return Encoded(np.append(ids, lost), np.append(mask, np.zeros(len(lost), np.uint8)), [len(ids)])

    def split(self) -> Encoded:
        """Runs of whole exchanges, each behind the system's messages; those that fit nowhere stand last, and are lost."""
        roles = [turn.message["role"] for turn in self._talk]
        size = len(roles)
        head = next((place for place, role in enumerate(roles) if role not in _SYSTEM), size)
        begins = [place for place in range(head + 1, size) if roles[place] == "user" != roles[place - 1]]
        kept: list[tuple[Ids, Mask]] = []
        lost: list[tuple[Ids, Mask]] = []
        begin = head
        while begin < size:
            end, found = self.longest(head, begin, [end for end in (*begins, size) if end > begin])
            if found is None:
                lost.append(self._rendered(head, begin, end))
            else:
                (kept if found[1].any() else lost).append(found)
            begin = end
        ids, masks = zip(*kept, *lost, strict=True)
        return Encoded(np.concatenate(ids), np.concatenate(masks), [*accumulate(len(one) for one, _ in kept)])

    def longest(self, head: int, begin: int, ends: Sequence[int]) -> tuple[int, tuple[Ids, Mask] | None]:
        """The last of `ends` up to which turns from `begin` on fit behind the first `head`, with their ids; the first end and
        None, if none fits.
        """
        low, high, stride = 0, len(ends), 1
        sizes = [self._sizes[head] + self._sizes[end] - self._sizes[begin] for end in ends]
        place = min(max(bisect(sizes, self._tokens_max) - 1, 0), high - 1)
        found: dict[int, tuple[Ids, Mask]] = {}
        while low < high:  # what is below `low` fits, what is from `high` on does not
            guessed = stride == 1  # and likely right
            ids, mask = self._rendered(head, begin, ends[place], masked=guessed)
            if len(ids) <= self._tokens_max:
                found |= {place: (ids, mask)} if guessed else {}
                low = place + 1
                known = _ALIKE if sizes[place] == len(ids) else self._surely
                if low < high and sizes[low] - sizes[place] + len(ids) > self._tokens_max + known:
                    break
                place = low + min(stride, (high - low + 1) // 2) - 1
            else:
                high = place
                place = high - min(stride, (high - low + 1) // 2)
            stride *= 2
        if not low:
            return ends[0], None
        return ends[low - 1], found.get(low - 1) or self._rendered(head, begin, ends[low - 1])

    def _rendered(self, head: int, begin: int, end: int, *, masked: bool = True) -> tuple[Ids, Mask]:
        def known(text: str) -> Tokens | None:
            """Those of the whole talk, if its text is there."""
            if self._begins is None:
                return None
            first, last = self._begins[max(begin, head)], self._begins[end]
            same = self._whole.text[first[1] : last[1]]
            before = text[: len(text) - len(same)]
            return self._chats.joined(before, self._whole, first, last) if text == before + same else None

        talk = [*self._talk[:head], *self._talk[begin:end]]
        return self._chats.rendered(talk, self._given, masked=masked, looked=self._looked, known=known)


@lru_cache(maxsize=8)
def chats(spec: ChatSpec, tokenizer: TokenizerSpec) -> Chats:
    return Chats(spec, tokenizer)


def _parsed(value: Any) -> Any:
    """Lists and objects are JSON where a format has none of them."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def conversation(record: Mapping[str, Any], chat: Chat) -> list[Turn]:
    """The turns of a record. `UnfitRecordError`."""
    if chat.completion is not None:
        return _answered(record, chat)
    messages = _parsed(field_at(record, chat.messages))
    if not isinstance(messages, list) or not messages:
        there = ", ".join(map(repr, list(record)[:8]))
        raise UnfitRecordError(f"no list of messages in the field {chat.messages!r}; it has {there or 'no field'}")
    return _turns(messages, chat)


def _turns(messages: Sequence[object], chat: Chat) -> list[Turn]:
    return [_turn(number, one, chat) for number, one in enumerate(messages)]


def _turn(number: int, message: object, chat: Chat) -> Turn:
    message = _parsed(message)
    if not isinstance(message, Mapping):
        raise UnfitRecordError(f"message {number} is no object")
    role = message.get(chat.role)
    role = chat.roles.get(str(role), role)
    if role not in ROLES:
        raise UnfitRecordError(
            f"message {number} has the {chat.role} {role!r}, known: {', '.join(ROLES[:5])}; say what it is by roles: {{{role}: user}}"
        )
    said = _SAYS_WHETHER if chat.train is None else (chat.train,)
    learned = all(_says_yes(number, name, message[name]) for name in said if name in message)
    for name in _OF_PARTS if chat.train is None else ():
        if message.get(name):
            raise UnfitRecordError(
                f"message {number} has {name!r}, and a message is learned whole or not; say so by chat: {{train: FIELD}}"
            )
    known = {"role": role, "content": message.get(chat.content)}
    rest = {key: value for key, value in message.items() if key not in (chat.role, chat.content, *known, *said)}
    found = {key: value for key, value in {**known, **rest}.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return Turn(found, learned and (chat.learn == "all" or role == ANSWERS))


def _says_yes(number: int, name: str, value: object) -> bool:
    """Whether a message is learned, by this field of it."""
    try:
        says = truth_of(value)
    except ValueError as error:
        more = "or name the field that says what is learned by chat: {train: FIELD}"
        raise UnfitRecordError(f"message {number} has {name}: {error}, {more}") from error
    return says is None or says != (name == _SAYS_NOT)


def _answered(record: Mapping[str, Any], chat: Chat) -> list[Turn]:
    """The turns of a record whose fields hold a prompt and its completion, as text or as messages. As in trl, nothing of the
    prompt is learned, unless all is.
    """
    assert chat.completion is not None
    assert chat.prompt is not None
    given = [field_at(record, name) for name in chat.prompt]
    completion = field_at(record, chat.completion)
    found = [turn for value in given if isinstance(value, list) for turn in _turns(value, chat)]
    if texts := [value for value in given if isinstance(value, str) and value]:
        found.append(Turn({"role": "user", "content": "\n\n".join(texts)}, chat.learn == "all"))
    if not found:
        raise UnfitRecordError(f"no prompt in the fields {', '.join(map(repr, chat.prompt))}")
    if chat.learn != "all":
        found = [turn._replace(learned=False) for turn in found]
    if isinstance(completion, list):
        return found + _turns(completion, chat)
    if not isinstance(completion, str) or not completion:
        raise UnfitRecordError(f"no text in the field {chat.completion!r}")
    return [*found, Turn({"role": ANSWERS, "content": completion}, learned=True)]


def _medium_of(part: object) -> str | None:
    """What a part of a message shows beside text, by its type or, as templates look at it, by a key."""
    if not isinstance(part, Mapping):
        return None
    return next((kind for kind in _MEDIA if part.get("type") == kind or part.get(kind) is not None), None)


def _mask(size: int, places: Sequence[tuple[int, int]]) -> Mask:
    mask = np.zeros(size, np.uint8)
    for first, last in places:
        mask[first:last] = 1
    return mask


def _size(text: str, place: int, names: Sequence[str]) -> int:
    """Characters of the name that stands there; 0: none."""
    return next((len(name) for name in names if text.startswith(name, place)), 0)


def _roles(talk: Sequence[Turn]) -> str:
    return ", ".join(str(one.message["role"]) for one in talk[:8]) + (", …" if len(talk) > 8 else "")
