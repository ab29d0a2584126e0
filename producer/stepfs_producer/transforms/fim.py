"""Fill in the middle: a document is cut at two places, and its middle comes last, behind tokens that name the parts.

As in arXiv:2207.14255: prefix, suffix, middle; or, "spm", its second variant: suffix, then prefix and middle in one. Whether
and where are drawn from the record's own key. A document that a row would cut stays as it is: a part of it would have a
suffix without its prefix. Rejected: rearranging its parts, whose length is that of a stage, which a transform does not
know: those of the shortest one would give the longer stages short documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Final, TypeVar

import numpy as np

from stepfs_producer.plan.arrays import Ids, Mask
from stepfs_producer.plan.sources import Fim
from stepfs_producer.transforms.tokenizer import Tokenizer

_BITS: Final = 64  # of a number drawn
_PURPOSE: Final = b"stepfs-fim-----1"
_PARTS: Final = ("prefix", "middle", "suffix")
_LEARNED: Final = np.ones((3, 1), np.uint8)
A = TypeVar("A", Ids, Mask)


class FimTransform:
    """Rearranges documents of at most `tokens_max` tokens. `UsageError` if the tokenizer lacks a token of it."""

    def __init__(self, fim: Fim, tokenizer: Tokenizer, tokens_max: int | None = None) -> None:
        self._plan, self._tokenizer = fim, tokenizer
        ends = (tokenizer.bos is not None) + (tokenizer.eos is not None)
        self._tokens_max = float("inf") if tokens_max is None else tokens_max - ends
        self.left = 0  # documents, so far, that are longer, and stay as they are
        ids = [tokenizer.id_of(f"fim {part}", name) for part, name in zip(_PARTS, fim.tokens, strict=True)]
        self._names = np.array(ids, np.int32).reshape(3, 1)

    def of_text(self, text: str, key: bytes) -> Ids | None:
        """The ids of a text; None: it stays as it is."""
        rate, order, *cuts = _drawn(key)
        if not (text and _below(rate, self._plan.rate)):
            return None
        if self._plan.level == "tokens":
            [ids] = self._tokenizer.encode_plain([text]).ids
            parts = np.split(ids, _places(len(ids), cuts))
        else:
            first, last = _places(len(text), cuts)
            parts = list(self._tokenizer.encode_plain([text[:first], text[first:last], text[last:]]).ids)
        return self._arranged(order, parts, self._names) if self._fits(sum(map(len, parts))) else None

    def of_ids(self, ids: Ids, mask: Mask | None, key: bytes) -> tuple[Ids, Mask | None]:
        """Token ids and their mask; the tokens that name the parts are learned."""
        rate, order, *cuts = _drawn(key)
        if not (len(ids) and _below(rate, self._plan.rate)):
            return ids, mask
        begin = int(len(ids) > 0 and ids[0] == self._tokenizer.bos)  # they come to the ends again
        end = len(ids) - int(len(ids) > begin and ids[-1] == self._tokenizer.eos)
        if not self._fits(end - begin):
            return ids, mask
        places = [begin + place for place in _places(end - begin, cuts)]
        found = self._arranged(order, np.split(ids[:end], places), self._names, begin)
        return found, None if mask is None else self._arranged(order, np.split(mask[:end], places), _LEARNED, begin)

    def _fits(self, tokens: int) -> bool:
        """Whether a document is still whole in a row with the tokens of its parts: one that is cut would lose some of them."""
        fits = tokens + len(self._names) <= self._tokens_max
        self.left += not fits
        return fits

    def _arranged(self, order: int, parts: Sequence[A], names: A, begin: int = 0) -> A:
        prefix, middle, suffix = parts
        before, between, behind = names
        if _below(order, self._plan.spm):
            return np.concatenate([before, behind, suffix, between, prefix[begin:], middle])
        return np.concatenate([before, prefix[begin:], behind, suffix, between, middle])


def _drawn(key: bytes) -> list[int]:
    """Four numbers: for the rate, the order, and the two cuts."""
    data = hashlib.blake2b(key, digest_size=4 * _BITS // 8, person=_PURPOSE).digest()
    numbers: list[int] = np.frombuffer(data, "<u8").tolist()
    return numbers


def _below(drawn: int, share: Fraction) -> bool:
    return drawn * share.denominator < share.numerator << _BITS


def _places(length: int, drawn: Sequence[int]) -> list[int]:
    return sorted(number * (length + 1) >> _BITS for number in drawn)
