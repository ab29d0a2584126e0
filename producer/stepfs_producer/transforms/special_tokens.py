"""Which tokens of a model begin and end a document and fill up a row: by the name given, else by usual names.

A tokenizer.json lists control tokens without their purpose. Where the end of a document cannot be found
without doubt it must be named: a wrong guess, such as the end of a chat's turn, would only show in a trained model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stepfs.errors import UsageError

NONE: Final = ("", "none")
_ENDS: Final = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "<EOS>",
    "[EOS]",
)
_PADDINGS: Final = (
    "<|pad|>",
    "<pad>",
    "[PAD]",
    "<PAD>",
    "<｜▁pad▁｜>",
    "<|padding|>",
    "<|finetune_right_pad_id|>",
)
_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a tokenizer's tokens, to find ids by."""

    file: str
    vocabulary: Mapping[str, int]
    special: Sequence[str]

    def special_ids(self, *, eos: str | None, bos: str | None, pad: str | None) -> tuple[int | None, int | None, int]:
        """Ids of EOS and BOS, None: no such token; and of padding, since rows must be filled up.

        None: the end of a document by its usual names, no token at its beginning, padding by its usual names, else
        the end, else 0. "" and `none`: no such token; padding is 0 then. `UsageError` names the nearest token.
        """
        end = self._end() if eos is None else self._id_of("eos", eos)
        begin = None if bos is None else self._id_of("bos", bos)
        if pad is None:
            padding = next((self.vocabulary[name] for name in _PADDINGS if name in self.vocabulary), end)
        else:
            padding = self._id_of("pad", pad)
        return end, begin, padding or 0

    def _end(self) -> int:
        found = [name for name in _ENDS if name in self.vocabulary]
        if len(found) == 1:
            return self.vocabulary[found[0]]
        among = found or list(self.special)
        shown = ", ".join(map(repr, among[:_SHOWN])) + (" …" if len(among) > _SHOWN else "")
        raise UsageError(
            f"{self.file} does not say which token ends a document; name it as eos, or give none"
            + (f" (it has {shown})" if among else "")
        )

    def _id_of(self, role: str, name: str) -> int | None:
        if name in NONE:
            return None
        if name in self.vocabulary:
            return self.vocabulary[name]
        nearest = _nearest(name, self.special) or _nearest(
            name, [known for known in self.vocabulary if abs(len(known) - len(name)) <= 1]
        )
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise UsageError(f"{self.file}: the {role} token {name!r} is not in its vocabulary{hint}")


def _nearest(name: str, known: Sequence[str]) -> str | None:
    close: Callable[..., list[str]] = difflib.get_close_matches
    return next(iter(close(name, known, n=1, cutoff=0.5)), None)
