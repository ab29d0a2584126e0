"""The exactly-once check of a plan: rank files, sources and the tokenizer are all it needs.

Each file says in `spans` which tokens of which document stand where. Putting all of them together must give every
document once, whole, with the tokens that the tokenizer makes of its text. Only the one document of each source in which
the plan stopped may lack its end.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from tokenizers import Tokenizer

from quickstart.corpus import EOS, texts_in

Document = tuple[str, int]  # source and offset


@dataclass(frozen=True, slots=True)
class PlanAudit:
    """What was found; `faults` is empty when every document is there exactly once."""

    files: int
    tokens: int
    documents: Counter[str]  # whole ones, by source
    faults: tuple[str, ...]


def audit_plan(mount: Path, corpus: Path) -> PlanAudit:
    """Read every step under `mount` and compare with the sources and the tokenizer in `corpus`."""
    pieces: dict[Document, list[tuple[int, list[int]]]] = defaultdict(list)
    ranks = sorted(mount.glob("step-*/rank-*"))
    for rank in ranks:
        collect(rank, pieces)
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    texts = {name: texts_in(corpus / f"{name}.jsonl") for name in ("code", "prose")}
    faults, whole, unfinished = [], Counter[str](), Counter[str]()
    for document, found in pieces.items():
        source, offset = document
        expected = [*tokenizer.encode(texts[source][offset]).ids, tokenizer.token_to_id(EOS)]
        ids = joined(sorted(found))
        if ids == expected:
            whole[source] += 1
        elif ids == expected[: len(ids or [])]:
            unfinished[source] += 1
        else:
            faults.append(f"{source} at byte {offset}: tokens missing, twice, or from elsewhere")
    faults += [
        f"{source}: {number} documents without end" for source, number in unfinished.items() if number > 1
    ]
    tokens = sum(len(ids) for found in pieces.values() for _, ids in found)
    return PlanAudit(len(ranks), tokens, whole, tuple(faults))


def collect(path: Path, pieces: dict[Document, list[tuple[int, list[int]]]]) -> None:
    with safe_open(path, framework="np") as file:
        names = json.loads(file.metadata()["sources"])
        ids = file.get_tensor("input_ids")
        for micro, start, tokens, source, _, _, offset, first in file.get_tensor("spans").tolist():
            pieces[names[source], offset].append((first, ids[micro, start : start + tokens].tolist()))


def joined(pieces: list[tuple[int, list[int]]]) -> list[int] | None:
    """The tokens of one document; None if one is missing or there twice."""
    ids: list[int] = []
    for first, piece in pieces:
        if first != len(ids):
            return None
        ids += piece
    return ids
