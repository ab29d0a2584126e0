"""The identity of a source, on which the cursors of a lake rest, and other samples of the same records, which are accepted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from stepfs._internal.image_patches import need_pillow
from stepfs.errors import RefusedError
from stepfs_producer.plan.model import Plan
from stepfs_producer.plan.part import Part, keys_of
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.plan.rules import Rules
from stepfs_producer.plan.step import State
from stepfs_producer.sources.listing import RULE
from stepfs_producer.sources.record import SourceSpec
from stepfs_producer.transforms.documents import TransformSpec

if TYPE_CHECKING:
    from stepfs_producer.run.load import LoadedSource

_REVISION: Final = 2  # of chats, pairs and `fim`: changes whenever the same record would give other ids or another mask
_REVISED: Final = {
    "pair": "answers are tokenised with their prompt, null contents and the prompt's own turns are left out",
    "chat": "null contents and excluded turns are not learned, nor those of a prompt beside its completion",
    "fim": "documents longer than a row stay as they are",
}


def identity(spec: SourceSpec, transform: TransformSpec, tokenizer_digest: str) -> str:
    """16 hexadecimal digits: a cursor means something only while they stay.

    `tokenizer_digest`: of the content of the tokenizer's file. The source's files are not part of it, because the digest
    of the listing stands beside it; nor is policy: epochs, weights, endpoint, profile, `long`, `on_error`, padding, and where
    chats are cut, as documents are.
    """
    source, chat = spec.source, transform.chat
    if source.images is not None:
        need_pillow()
    tokens = [] if chat is None else [one for one in chat.tokens if one[1] is not None]
    known = {
        "rule": RULE,
        "source": _identity_of(source),
        "seed": spec.seed,
        "held_out": spec.held_out,
        "tokenizer": [_identity_of(transform.tokenizer.tokenizer), tokenizer_digest],
        "columns": [[one.name, _identity_of(one.column)] for one in transform.columns],
        "chat": None if chat is None else [chat.templates.default, tokens],
    }
    if source.is_of_chats or source.fim is not None:
        known["revision"] = [_REVISION, chat and chat.templates.of_tools, source.fim and transform.tokens_max]
    text = json.dumps(known, ensure_ascii=False, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8, person=b"stepfs-source").hexdigest()


def _identity_of(value: object) -> Any:
    """What a part says of records and samples, as JSON: without policy.

    A key that is None is left out, and a later key that is its default: it changes nothing for those who do not use it.
    """
    if isinstance(value, Part):
        named = {key.name: getattr(value, key.name) for key in keys_of(type(value)) if not key.policy}
        later = {key.name for key in keys_of(type(value)) if key.later and named.get(key.name) == key.default()}
        return {name: _identity_of(one) for name, one in named.items() if one is not None and name not in later}
    if isinstance(value, tuple):
        return [_identity_of(one) for one in value]
    return str(value) if isinstance(value, Fraction) else value


def revised(
    rules: Rules,
    sources: Sequence[LoadedSource],
    state: State,
    then: Plan,
    now: Plan,
    *,
    accept: bool,
    say: Callable[[str], None],
) -> Rules:
    """The rules, with sources accepted whose records were made other samples, by the same plan: another version of this program
    did so, or what it found beside the tokenizer changed. `then`: the plan of the steps so far.
    """
    found = dict(rules.sources)
    for one in sources:
        name, rule = one.spec.name, found[one.spec.name]
        was = state.sources.get(name)
        kind = next((kind for kind in _REVISED if getattr(one.spec.source, kind) is not None), None)
        if was is None or was.identity == rule.identity or kind is None:
            continue
        if state.tokenizer != rules.tokenizer or _said_of(then, name) != _said_of(now, name):
            continue  # another source, which is refused by its name
        what = f"source {name}: {kind} makes other samples than in its steps so far, by another version of stepfs ({_REVISED[kind]})"
        if one.transform.chat is not None:
            what += ", or because the chat template or the special tokens beside the tokenizer changed"
        if not accept:
            raise RefusedError(f"{what}; add --accept-changes to go on with them from step {state.step} on")
        begins = " with the record that was begun" if was.into else ""
        say(f"warning: {what}; it goes on{begins}")
        found[name] = replace(rule, accepted=was.identity)
    return replace(rules, sources=found)


def _said_of(plan: Plan, name: str) -> object:
    """What a plan says of the identity of a source; None if it has none of that name."""
    plan = resolve(plan)
    if name not in plan.sources:
        return None
    columns = [[name, _identity_of(column)] for name, column in sorted(plan.output.columns.items())]
    return _identity_of(plan.sources[name]), plan.seed, _identity_of(plan.tokenizer), columns
