"""Two lakes of one plan, one of them tormented: equal to the byte, and every record exactly once.

The spans in the payloads say which tokens of which record stand where; the corpus says what those tokens are.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import trio

from spans_audit import Address, Piece, by_record, joined, payloads_of, pieces_of
from stepfs.format import keys
from stepfs.format.commit import decode_commit
from stepfs.format.ids import Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs_producer.commit.uploads import unpack_position
from stepfs_producer.plan.step import State, read_position
from torture.planned.corpus import FRACTIONAL, Corpus


@dataclass
class PlannedLake:
    """A lake of one producer, as far as the audit needs it."""

    digests: list[tuple[str, ...]] = field(default_factory=list)  # per step, per slice
    pieces: list[list[Piece]] = field(default_factory=list)  # per step
    positions: dict[int, State] = field(default_factory=dict)  # after so many steps, where a commit ended


@dataclass
class Audit:
    """What was found; `faults` is empty when everything holds."""

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    epochs: dict[str, int] = field(default_factory=dict)
    positions: int = 0
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(what)


def read_lake(url: str) -> PlannedLake:
    """All steps and commits of a lake."""
    return trio.run(_read, url)


async def _read(url: str) -> PlannedLake:
    lake = PlannedLake()
    store = open_store(url)
    try:
        identity = await open_lake(store)
        log = await LogReader.open(store, identity)
        for number in range(log.state.next_step):
            payloads = await payloads_of(store, (await log.entry(Step(number))).tgb)
            lake.digests.append(tuple(hashlib.sha256(payload).hexdigest() for payload in payloads))
            lake.pieces.append([piece for payload in payloads for piece in pieces_of(identity.ext, payload)])
        for entry in await store.list(keys.log_prefix(identity.lake_id)):
            body = await store.get(entry.key)
            assert body is not None
            commit = decode_commit(body, entry.key)
            if commit.tgbs:
                lake.positions[commit.next_seq] = read_position(unpack_position(commit.position))
    finally:
        await store.aclose()
    return lake


def audit_planned(corpus: Corpus, tormented: PlannedLake, undisturbed: PlannedLake) -> Audit:
    """Hold both lakes against each other, and the tormented one against the corpus."""
    audit = Audit(steps=len(tormented.digests))
    if len(tormented.digests) != len(undisturbed.digests):
        audit.fault(f"{len(tormented.digests)} steps, {len(undisturbed.digests)} in the undisturbed lake")
    for step, (ours, theirs) in enumerate(zip(tormented.digests, undisturbed.digests, strict=False)):
        if ours != theirs:
            audit.fault(f"step {step} has other bytes than in the undisturbed lake")
    _audit_positions(tormented, undisturbed, audit)
    _audit_records(corpus, tormented, audit)
    return audit


def _audit_positions(tormented: PlannedLake, undisturbed: PlannedLake, audit: Audit) -> None:
    """Equal where both lakes have one; each says as many tokens as stand in the steps before it."""
    if not tormented.positions or max(tormented.positions) != len(tormented.digests):
        audit.fault(f"the newest position is not of step {len(tormented.digests)}")
    tokens: Counter[str] = Counter()
    for step in range(len(tormented.pieces) + 1):
        position = tormented.positions.get(step)
        if position is not None:
            audit.positions += 1
            told = Counter({name: source.tokens for name, source in position.sources.items()})
            if position.step != step or +told != +tokens:
                audit.fault(f"the position behind step {step} is of step {position.step} and {told}, not {tokens}")
            if step in undisturbed.positions and undisturbed.positions[step] != position:
                audit.fault(f"the position behind step {step} is not the undisturbed one")
        if step < len(tormented.pieces):
            for piece in tormented.pieces[step]:
                tokens[piece.address[0]] += len(piece.ids)


def _audit_records(corpus: Corpus, lake: PlannedLake, audit: Audit) -> None:
    for number, step in enumerate(lake.pieces):
        if not _pairs_stand_together(step):
            audit.fault(f"step {number}: a pair's documents do not stand one behind the other in one micro-batch")
    records = by_record(piece for step in lake.pieces for piece in step)
    audit.samples = len(records)
    end = lake.positions[max(lake.positions)]
    begun: Counter[str] = Counter()
    seen: dict[tuple[str, int], set[Address]] = defaultdict(set)
    for (epoch, address), pieces in records.items():
        if address not in corpus.texts:
            audit.fault(f"epoch {epoch}: no record {address}, or a bad one")
            continue
        seen[address[0], epoch].add(address)
        if fault := _fault_in(corpus, address, pieces):
            audit.fault(f"epoch {epoch}: record {address}: {fault}")
        if sum(len(piece.ids) for piece in pieces) < len(corpus.ids(address)):
            begun[address[0]] += 1
            if end.sources[address[0]].into == 0 or end.sources[address[0]].epoch != epoch:
                audit.fault(f"epoch {epoch}: record {address} is not whole, and the cursor is not in it")
    for name, count in begun.items():
        if count > 1:
            audit.fault(f"source {name}: {count} records are not whole")
    _audit_epochs(corpus, end, seen, audit)


def _pairs_stand_together(step: list[Piece]) -> bool:
    sided = [piece for piece in step if piece.side]
    return all(
        (one.side, other.side) == (1, 2) and (one.address, one.micro) == (other.address, other.micro)
        for one, other in zip(sided[::2], sided[1::2], strict=False)  # half a pair is not whole
    )


def _fault_in(corpus: Corpus, address: Address, pieces: list[Piece]) -> str:
    """Tokens must be contiguous from the first one on, and the record's own; documents of its own are not cut."""
    ids = joined(pieces)
    if ids is None:
        return "tokens are lost or there twice"
    if ids != corpus.ids(address)[: len(ids)]:
        return "other tokens"
    cuts = {piece.first for piece in pieces}.difference(corpus.starts(address))
    return f"cut at {sorted(cuts)}" if cuts else ""


def _audit_epochs(corpus: Corpus, end: State, seen: Mapping[tuple[str, int], set[Address]], audit: Audit) -> None:
    """An epoch below the cursor has every good record; up to the cursor, as many as the position says."""
    for name, source in end.sources.items():
        good = corpus.records(name)
        bad = sum(address[0] == name for address in corpus.bad)
        audit.epochs[name] = source.epoch
        audit.skipped += source.skipped
        whole = min(source.epoch, FRACTIONAL.get(name, source.epoch))
        for epoch in range(whole):
            if missing := good - seen.get((name, epoch), set()):
                audit.fault(f"source {name}, epoch {epoch}: {len(missing)} records are lost: {sorted(missing)[:5]}")
        given = sum(len(addresses) for (of, _), addresses in seen.items() if of == name) - bool(source.into)
        if name not in FRACTIONAL and given + source.skipped != source.records:
            audit.fault(f"source {name}: {given} + {source.skipped} skipped are not {source.records} records")
        if not whole * bad <= source.skipped <= (source.epoch + 1) * bad:
            audit.fault(f"source {name}: {source.skipped} skipped in {source.epoch} epochs of {bad} bad records")
