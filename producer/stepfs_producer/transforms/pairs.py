"""Preference pairs → two documents of one record: a prompt with the chosen answer, and with the rejected one; or the one of
an answer that the record's label calls either.

Answers are learned, prompts are not. As in trl, a prompt and its answer are tokenised as one text, and the answer begins
where its tokens leave those of the prompt alone; with a chat template, they are one conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from stepfs_producer.plan.arrays import Ids, Mask
from stepfs_producer.plan.sources import Pair
from stepfs_producer.transforms.documents import Encoded, UnfitRecordError, documents_of, field_at, truth_of
from stepfs_producer.transforms.tokenizer import Tokenizer

if TYPE_CHECKING:
    from stepfs_producer.transforms.chat import Chats


class Pairs:
    """Pairs of one source. `chats`: renders them; None: they are text."""

    def __init__(self, pair: Pair, tokenizer: Tokenizer, chats: Chats | None) -> None:
        self._pair, self._tokenizer, self._chats = pair, tokenizer, chats

    def encode(self, record: object) -> Encoded:
        """The documents end to end. `UnfitRecordError` names what no pair has."""
        names = self._pair.answers_in
        if not isinstance(record, Mapping):
            raise UnfitRecordError(f"no object with the fields {' and '.join(map(repr, names))}")
        rejected = self._pair.label is not None and not self._label_of(record, self._pair.label)
        prompt, *answers = self._parts_of(record)
        for name, answer in zip(names, answers, strict=True):
            if not answer:
                raise UnfitRecordError(f"nothing in {name!r} behind the prompt")
        found = self._as_text(prompt, *answers) if self._chats is None else self._as_chats(record, prompt, *answers)
        assert found.mask is not None
        for name, mask in zip(names, np.split(found.mask, found.documents[:-1]), strict=True):
            if not mask.any():
                raise UnfitRecordError(f"no learned token in {name!r}; an answer has text, or an assistant's message")
        return found if self._pair.label is None else Encoded(found.ids, found.mask, rejected=rejected)

    def _label_of(self, record: Mapping[str, Any], name: str) -> bool:
        if all(record.get(one) is not None for one in ("chosen", "rejected")):
            raise UnfitRecordError(
                f"two answers beside {name!r}; a source of labels has one, a source of pairs no label"
            )
        try:
            found = truth_of(field_at(record, name))
        except ValueError as error:
            raise UnfitRecordError(f"{name}: {error}") from error
        if found is None:
            raise UnfitRecordError(f"no label in the field {name!r}; it has {_fields_of(record)}")
        return found

    def _parts_of(self, record: Mapping[str, Any]) -> list[Any]:
        """Prompt and answers, all texts or all lists of messages."""
        values = {name: field_at(record, name) for name in self._pair.answers_in}
        named = self._pair.asks_in or ("prompt" if record.get("prompt") is not None else None)
        if named is not None:
            values = {named: field_at(record, named), **values}
        kinds = (str,) if self._chats is None else (str, list)
        for name, value in values.items():
            if not isinstance(value, kinds):
                is_chat = isinstance(value, list)
                raise UnfitRecordError(
                    f"messages in the field {name!r}; add chat: {{}} to the source, which renders them"
                    if is_chat
                    else f"no answer or prompt in the field {name!r}; it has {_fields_of(record)}"
                )
        return list(values.values()) if self._pair.label is not None else self._of_two(*values.values())

    def _of_two(self, *values: Any) -> list[Any]:
        """The same of two answers, which may be whole conversations."""
        *prompt, chosen, rejected = values
        if not prompt:
            if type(chosen) is not type(rejected):
                raise UnfitRecordError("one answer is text and the other messages, and there is no prompt")
            return _parted(chosen, rejected)
        if isinstance(chosen, list) and isinstance(rejected, list):
            # Whole conversations beside a prompt, as UltraFeedback has them: trl takes what they begin with for the prompt.
            if isinstance(prompt[0], list):
                size = len(prompt[0])
                if size and chosen[:size] == rejected[:size] == prompt[0]:
                    return [prompt[0], chosen[size:], rejected[size:]]
            elif (parted := _parted(chosen, rejected))[0] and self._asks(parted[0]):
                return parted
        return [prompt[0], chosen, rejected]

    def _asks(self, messages: list[Any]) -> bool:
        """Whether a conversation begins so; an answer, too, may have a beginning that both share."""
        assert self._chats is not None
        return bool(self._chats.messages_of(messages, "user")[0].message["role"] != "assistant")

    def _as_text(self, prompt: str, *answers: str) -> Encoded:
        try:
            size = max(len(prompt.encode()) + len(one.encode()) for one in answers)
        except UnicodeEncodeError as error:
            raise UnfitRecordError("half a character (a lone surrogate)") from error
        if size > self._tokenizer.text_bytes_max:
            raise UnfitRecordError(
                f"a text of {size} bytes; this tokenizer takes at most {self._tokenizer.text_bytes_max}"
            )
        before, *whole = self._tokenizer.encode_plain([prompt, *(prompt + one for one in answers)]).ids
        begin = min(_common(before, ids) for ids in whole)
        masks: list[Mask | None] = [(np.arange(len(ids)) >= begin).astype(np.uint8) for ids in whole]
        closed = documents_of(whole, masks).closed(self._tokenizer.bos, self._tokenizer.eos)
        assert closed.mask is not None
        ids = closed.ids.values
        first = closed.ids.begins[closed.ids.lengths > 0]
        closed.mask[first[ids[first] == self._tokenizer.bos]] = 0  # the prompt's, if no other token is
        return Encoded(ids, closed.mask, closed.ids.ends.tolist())

    def _as_chats(self, record: Mapping[str, Any], prompt: Any, *answers: Any) -> Encoded:
        assert self._chats is not None
        chats = self._chats
        before = chats.system_of(record) + (chats.messages_of(prompt, "user") if prompt else [])
        before, given = [turn._replace(learned=False) for turn in before], chats.given_of(record)
        talks = [[*before, *chats.messages_of(answer, "assistant")] for answer in answers]
        found = [chats.rendered(*chats.prepared(talk, given)) for talk in talks]
        ids, masks = zip(*found, strict=True)
        return Encoded(np.concatenate(ids), np.concatenate(masks), [*accumulate(map(len, ids))])


def _fields_of(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, list(record)[:8])) or "no field"


def _common(ids: Ids, others: Ids) -> int:
    size = min(len(ids), len(others))
    other = np.flatnonzero(ids[:size] != others[:size])
    return int(other[0]) if len(other) else size


def _parted(chosen: Any, rejected: Any) -> list[Any]:
    """What both begin with, without a space at its end, and the rest of each."""
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    same -= chosen[same - 1 : same] == " "
    return [chosen[:same], chosen[same:], rejected[same:]]
