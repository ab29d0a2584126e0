"""The exactly-once check of a plan: rank files, sources and the tokenizer are all it needs.

Each file says in `spans` which tokens of which document stand where. Putting all of them together must give every
document once, whole, with the tokens that the tokenizer makes of its text. Only the one document of each source in which
the plan stopped may lack its end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from quickstart.corpus import EOS, texts_in
from spans_audit import joined, read_mount


@dataclass(frozen=True, slots=True)
class PlanAudit:
    """What was found; `faults` is empty when every document is there exactly once."""

    files: int
    tokens: int
    documents: Counter[str]  # whole ones, by source
    faults: tuple[str, ...]


def audit_plan(mount: Path, corpus: Path) -> PlanAudit:
    """Read every step under `mount` and compare with the sources and the tokenizer in `corpus`."""
    ranks, records = read_mount(mount)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    texts = {name: texts_in(corpus / f"{name}.jsonl") for name in ("code", "prose")}
    faults, whole, unfinished = [], Counter[str](), Counter[str]()
    for (_, (source, _, offset)), pieces in records.items():
        expected = [*tokenizer.encode(texts[source][offset]).ids, tokenizer.token_to_id(EOS)]
        ids = joined(pieces)
        if ids == expected:
            whole[source] += 1
        elif ids == expected[: len(ids or [])]:
            unfinished[source] += 1
        else:
            faults.append(f"{source} at byte {offset}: tokens missing, twice, or from elsewhere")
    faults += [f"{source}: {number} documents without end" for source, number in unfinished.items() if number > 1]
    tokens = sum(len(piece.ids) for pieces in records.values() for piece in pieces)
    return PlanAudit(ranks, tokens, whole, tuple(faults))
