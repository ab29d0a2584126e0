"""After the torture: every record, every byte, every object and everything that should not be there any more.

What the readers saw (each of them every step, most of it long reclaimed) is held against what the producers wrote and
were told; what is left in the store is held against what the log says is live.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import trio

from stepfs.format import keys
from stepfs.format.ids import SEGMENT_STEPS, Step
from stepfs.lake.identity import open_lake
from stepfs.lake.log.reader import LogReader
from stepfs.store.opening import open_store
from stepfs.store.probe import PREFIX as PROBES
from torture.records import notes
from torture.run import Run, run_stepfs

_SHOWN_MAX = 5


@dataclass
class Audit:
    """What was found; `faults` is empty when everything holds."""

    steps: int = 0
    records: int = 0
    readings: int = 0  # steps read, again after each restart
    lost: int = 0
    duplicated: int = 0
    torn: int = 0
    disordered: int = 0
    differing: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    live: int = 0
    probes: int = 0  # objects that killed producers left of their looks at the store
    left_over: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        if len(self.faults) < 100:
            self.faults.append(what)


@dataclass(frozen=True, slots=True)
class Seen:
    """One step as a reader saw it."""

    sha: str
    producer: str
    record: int


def audit_journals(run: Run, total: int) -> Audit:
    """Each record of each producer exactly once, in order; all readers agree; nothing acknowledged is missing."""
    audit = Audit(steps=total)
    steps: dict[int, Seen] = {}
    for reader in run.of("reader"):
        assert reader.journal is not None
        mine = set()
        for note in notes(reader.journal):
            audit.torn += str(note.get("fault", "")).startswith("torn")
            if "sha" in note:
                audit.readings += 1
                mine.add(note["step"])
                seen = Seen(note["sha"], *note["whose"])
                if steps.setdefault(note["step"], seen) != seen:
                    audit.differing += 1
                    audit.fault(f"{reader.name}: step {note['step']} is {seen}, was {steps[note['step']]}")
        if mine != set(range(total)):
            absent = sorted(set(range(total)) - mine)
            audit.fault(f"{reader.name} did not see {len(absent)} steps {absent[:_SHOWN_MAX]}, saw {len(mine)}")
    _audit_records(run, audit, [steps[step] for step in sorted(steps)])
    _audit_epochs(run, audit)
    return audit


def _audit_records(run: Run, audit: Audit, order: list[Seen]) -> None:
    found: dict[str, list[int]] = defaultdict(list)
    for seen in order:
        found[seen.producer].append(seen.record)
    for producer in run.of("producer"):
        assert producer.journal is not None
        told, last = 0, {}
        for note in notes(producer.journal):
            told = max(told, note.get("committed", 0), note.get("started", 0))
            if "tally" in note:
                last[note["pid"]] = note["tally"]
        for tally in last.values():
            audit.tally.update(tally)
        records = found.pop(producer.name, [])
        times = Counter(records)
        end = max(told, max(records, default=-1) + 1)
        audit.records += len(times)
        audit.lost += sum(record not in times for record in range(end))
        audit.duplicated += sum(count - 1 for count in times.values())
        if records != sorted(records):
            audit.disordered += 1
        if records != list(range(end)):
            audit.fault(f"{producer.name}: {len(records)} records found, not exactly 0 to {end - 1} in order")
    for stranger in found:
        audit.fault(f"steps of an unknown producer {stranger}")


def _audit_epochs(run: Run, audit: Audit) -> None:
    """What the mounts said of each step: versions rise, and no incarnation publishes after its successor."""
    said: dict[int, dict[str, Any]] = {}
    for reader in run.of("reader"):
        assert reader.journal is not None
        for note in notes(reader.journal):
            if "epoch" in note:
                said[note["step"]] = note
    epochs: dict[str, int] = {}
    version = -1
    for step in sorted(said):
        note = said[step]
        if note["said"] != note["whose"][0]:
            audit.fault(f"step {step} is said to be of {note['said']} but holds bytes of {note['whose'][0]}")
        if note["epoch"] < epochs.get(note["said"], 0) or note["version"] < version:
            audit.fault(f"step {step} was published by an incarnation that was fenced: {note}")
        epochs[note["said"]], version = note["epoch"], note["version"]


def audit_lake(run: Run, audit: Audit, environment: dict[str, str]) -> None:
    """`verify` is clean; a final reclaim leaves what the kept checkpoints need, and nothing else."""
    if run.of("reader"):
        for _ in range(2):
            done = run_stepfs(environment, "reclaim", run.lake, "--grace", "0", "--json")
            if done.returncode != 0:
                audit.fault(f"final reclaim: exit code {done.returncode}: {done.stderr.strip()}")
                return
        if json.loads(done.stdout)["deleted"]["objects"]:
            audit.fault(f"a second reclaim in a row still found something to delete: {done.stdout.strip()}")
    done = run_stepfs(environment, "verify", run.lake, "--json")
    report = json.loads(done.stdout or "{}")
    if done.returncode != 0 or report.get("errors"):
        audit.fault(f"verify: exit code {done.returncode}: {report.get('errors')} {done.stderr.strip()}")
    trio.run(_audit_objects, run, audit)
    if report.get("steps") != audit.live:
        audit.fault(f"verify read {report.get('steps')} steps, {audit.live} are live")


async def _audit_objects(run: Run, audit: Audit) -> None:
    """Every object in the store is one that the protocol still wants."""
    store = open_store(run.lake)
    identity = await open_lake(store)
    log = await LogReader.open(store, identity)
    groups = log.control.groups
    lake_id, floor, first = identity.lake_id, log.control.floor, log.first_live_step
    need = min((group.need for group in groups.values()), default=first)
    if first != need or log.state.next_step != audit.steps:
        audit.fault(f"live are {first} to {log.state.next_step}, needed {need} to {audit.steps}")
    audit.live = log.state.next_step - first
    entries = [await log.entry(Step(step)) for step in range(first, log.state.next_step)]
    wanted = {keys.LAKE, *(entry.tgb.key for entry in entries)}
    for producer in log.state.producers.values():
        if producer.next_seq != max((n["committed"] for n in _acks(run, producer.producer_id)), default=0):
            audit.fault(f"{producer.producer_id}: the log has {producer.next_seq} records, its last word differs")
    controls = []
    for entry in await store.list(""):
        key = entry.key
        audit.probes += key.startswith(PROBES)
        if (number := keys.number_of(keys.control_prefix(lake_id), key)) is not None:
            controls.append(number)
        elif key not in wanted and not _in_use(lake_id, key, floor=floor, first=first):
            audit.left_over.append(key)
        wanted.discard(key)
    if sorted(controls) != list(range(len(controls))):
        audit.fault(f"control records are missing: {sorted(controls)}")
    for key in wanted:
        audit.fault(f"{key} is needed and not there")
    if audit.left_over:
        audit.fault(f"{len(audit.left_over)} objects nobody needs: {audit.left_over[:_SHOWN_MAX]}")
    await store.aclose()


def _acks(run: Run, name: str) -> list[dict[str, Any]]:
    return [note for note in notes(run.directory / f"{name}.journal") if "committed" in note]


def _in_use(lake_id: str, key: str, *, floor: int, first: int) -> bool:
    for prefix in (keys.log_prefix(lake_id), keys.snapshot_prefix(lake_id)):
        if (number := keys.number_of(prefix, key)) is not None:
            return number >= floor
    if (segment := keys.segment_of(keys.index_prefix(lake_id), key)) is not None:
        return (segment + 1) * SEGMENT_STEPS > first
    # What a producer killed while it was starting left of its probe has a name of its own and belongs to no lake.
    return key.startswith(PROBES)
