"""Preference pairs → two documents of one record: a prompt with the chosen answer, and with the rejected one.

Answers are learned, prompts are not. Texts are tokenised apart from each other, as trl does; with a chat template, prompt
and answer are one conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from stepfs_producer.plan.arrays import Ids, Mask
from stepfs_producer.plan.sources import Pair
from stepfs_producer.transforms.documents import Encoded, UnfitRecordError, documents_of
from stepfs_producer.transforms.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stepfs_producer.transforms.chat import Chats


class Pairs:
    """Pairs of one source. `chats`: renders them; None: they are text."""

    def __init__(self, pair: Pair, tokenizer: Tokenizer, chats: Chats | None) -> None:
        self._pair, self._tokenizer, self._chats = pair, tokenizer, chats

    def encode(self, record: object) -> Encoded:
        """Both documents end to end. `UnfitRecordError` names what no pair has."""
        if not isinstance(record, Mapping):
            raise UnfitRecordError("no object with a chosen and a rejected answer")
        names = (self._pair.chosen, self._pair.rejected)
        prompt, *answers = self._parts_of(record)
        for name, answer in zip(names, answers, strict=True):
            if not answer:
                raise UnfitRecordError(f"nothing in {name!r} behind the prompt")
        found = self._as_text(prompt, *answers) if self._chats is None else self._as_chats(record, prompt, *answers)
        for name, mask in zip(names, np.split(found[1], found[2][:1]), strict=True):
            if not mask.any():
                raise UnfitRecordError(f"no learned token in {name!r}; an answer has text, or an assistant's message")
        return found

    def _parts_of(self, record: Mapping[str, Any]) -> list[Any]:
        """Prompt and answers, all texts or all lists of messages."""
        values = {name: record.get(name) for name in (self._pair.chosen, self._pair.rejected)}
        named = self._pair.prompt or ("prompt" if record.get("prompt") is not None else None)
        if named is not None:
            values = {named: record.get(named), **values}
        kinds = (str,) if self._chats is None else (str, list)
        for name, value in values.items():
            if not isinstance(value, kinds):
                is_chat = isinstance(value, list)
                raise UnfitRecordError(
                    f"messages in the field {name!r}; add chat: {{}} to the source, which renders them"
                    if is_chat
                    else f"no answer or prompt in the field {name!r}; it has {', '.join(map(repr, list(record)[:8]))}"
                )
        found: list[Any] = list(values.values())
        if named is None:
            if type(found[0]) is not type(found[1]):
                raise UnfitRecordError("one answer is text and the other messages, and there is no prompt")
            same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*found, strict=False)))
            same -= found[0][same - 1 : same] == " "
            found = [found[0][:same], *(one[same:] for one in found)]
        return found

    def _as_text(self, prompt: str, *answers: str) -> Encoded:
        try:
            size = max(len(prompt.encode()) + len(one.encode()) for one in answers)
        except UnicodeEncodeError as error:
            raise UnfitRecordError("half a character (a lone surrogate)") from error
        if size > self._tokenizer.text_bytes_max:
            raise UnfitRecordError(
                f"a text of {size} bytes; this tokenizer takes at most {self._tokenizer.text_bytes_max}"
            )
        plain = self._tokenizer.encode_plain([prompt, *answers])
        before, *behind = np.split(plain.ids, np.cumsum(plain.lengths)[:-1])
        ids: list[Ids] = [np.concatenate([before, one]) for one in behind]
        masks: list[Mask | None] = [np.repeat(np.array([0, 1], np.uint8), [len(before), len(one)]) for one in behind]
        closed = documents_of(ids, masks).closed(self._tokenizer.bos, self._tokenizer.eos)
        assert closed.mask is not None
        return closed.ids, closed.mask, tuple(closed.lengths.tolist())

    def _as_chats(self, record: Mapping[str, Any], prompt: Any, *answers: Any) -> Encoded:
        assert self._chats is not None
        chats = self._chats
        before = chats.system_of(record) + (chats.messages_of(prompt, "user") if prompt else [])
        tools = chats.tools_of(record)
        found = [
            chats.rendered([*before, *chats.messages_of(answer, "assistant")], tools, answer=len(before))
            for answer in answers
        ]
        ids, masks = zip(*found, strict=True)
        return np.concatenate(ids), np.concatenate(masks), tuple(map(len, ids))
