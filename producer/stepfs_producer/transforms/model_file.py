"""A model's tokenizer.json, changed so that it encodes documents: whole, one by one, and control tokens as text.

Such files are saved for inference. They may cut texts (`truncation`), fill up a batch (`padding`) or draw at random
(`dropout`, Unigram's sampling); here the ids of a text depend on the text alone. And a document that spells a control
token, such as `</s>` in a page about tokenizers, must not end there. `encode_special_tokens` keeps the library from
matching control tokens, but some models find them in their own vocabulary: a Unigram model prefers `</s>` to its
characters. So control tokens get names that no text spells; their ids stay.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

_UNSPELLED: Final = "\0stepfs control token\0"
_FOR_INFERENCE: Final = ("truncation", "padding")
_RANDOM: Final = ("dropout", "alpha", "nbest_size")


def prepared(model_json: str, named: Collection[str]) -> tuple[str, dict[str, str]]:
    """The JSON for encoding documents, and the new names of its control tokens.

    Control tokens are the added tokens that are special or `named`. `ValueError`, `TypeError`, `KeyError` or
    `AttributeError` if the JSON is no tokenizer's.
    """
    data: dict[str, Any] = json.loads(model_json)
    model: dict[str, Any] = data["model"]
    for key in _FOR_INFERENCE:
        data[key] = None
    for key in _RANDOM:
        if key in model:
            model[key] = None
    names: dict[str, str] = {}
    for token in data.get("added_tokens") or ():
        token["special"] = token["special"] or token["content"] in named
        if token["special"] and token["content"] != _unknown(model):
            names[token["content"]] = token["content"] = _UNSPELLED + token["content"]
    _rename(model, names)
    return json.dumps(data), names


def _unknown(model: dict[str, Any]) -> str | None:
    """The token for unknown characters, which the model looks up by its name."""
    if model.get("unk_id") is not None:
        name: str = model["vocab"][model["unk_id"]][0]
        return name
    return model.get("unk_token")


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
    if names and model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_parts(merge))]


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
