"""What must hold at every moment of a simulated run, checked as each request is carried out by the store.

The ledger knows the truth because it sees every write: it folds the log with the real `apply`, reads what each commit
publishes out of the store at that very moment, and remembers what was promised to whom. It never asks the actors.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgpack
from crc32c import crc32c
from doubles.faulty_store import Event, ObjectMap

from stepfs.errors import StepfsError
from stepfs.format.commit import Commit, CommitKind, decode_commit
from stepfs.format.ids import SliceIndex, Version
from stepfs.format.keys import (
    LAKE,
    consumers_prefix,
    data_prefix,
    floor_prefix,
    log_prefix,
    number_of,
    numbered,
    segment_of_entries_key,
    segment_of_key,
    snapshot_prefix,
)
from stepfs.format.records import FloorRecord, LakeIdentity, decode_consumer, decode_floor
from stepfs.format.snapshot import LogState, StepEntry, genesis
from stepfs.lake.log.apply import apply


def payload(producer_id: str, number: int, index: int) -> bytes:
    """Slice `index` of record `number`; says what it is, in a length that differs from its neighbours'."""
    return f"{producer_id} {number} {index} ".encode().ljust(24 + (number * 7 + index * 3) % 40, b".")


@dataclass
class Ledger:
    """The truth about one lake, and the first thing found to contradict it."""

    shared: ObjectMap
    identity: LakeIdentity
    segment_steps: int
    stop: Callable[[], None] = lambda: None
    broken: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    steps: list[StepEntry] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)  # producer → its records in the log
    farewells: set[tuple[str, int]] = field(default_factory=set)  # (producer, epoch) of every retiring commit
    promises: dict[str, int] = field(default_factory=dict)  # group → first step that was promised to it
    newest_records: set[bytes] = field(
        default_factory=set
    )  # ids of group records that were their group's newest
    floor: FloorRecord | None = None

    def __post_init__(self) -> None:
        self.state: LogState = genesis(self.identity.lake_id, self.identity.slices)
        self._step_of_key: dict[str, int] = {}
        self._given_up = 0  # what may have gone when the last group retired
        self.shared.watch = self._watch

    def onto(self, shared: ObjectMap) -> Ledger:
        """The same truth about a copy of the store."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | list | set):
                setattr(twin, name, copy.copy(value))
        twin.shared = shared
        shared.watch = twin._watch
        return twin

    @property
    def first_needed(self) -> int:
        """The least step promised to anybody; nothing from here on may go."""
        if self.promises:
            self._given_up = min(self.promises.values())
        return self._given_up

    @property
    def floor_version(self) -> int:
        return self.floor.floor if self.floor else 0

    @property
    def first_live_step(self) -> int:
        return self.floor.first_live_step if self.floor else 0

    def blame(self, what: str) -> None:
        """Record a broken invariant and end the run."""
        self.broken.append(what)
        self.stop()

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.blame(what)

    def promise(self, group: str, step: int) -> None:
        """From now on `group` may read from `step` on, whatever happens."""
        self.promises[group] = step
        self.require(
            step >= self.first_live_step,
            f"group {group} was promised step {step}, but steps below {self.first_live_step} are reclaimed",
        )

    def release(self, group: str) -> None:
        """The group is being retired: it needs nothing from now on."""
        _ = self.first_needed
        self.promises.pop(group, None)

    def _watch(self, event: Event) -> None:
        if event.fault == "landed late":
            self.counts["landed late"] += event.outcome in {"created", "put"}
        if event.outcome == "created":
            self._created(event.keys[0])
        elif event.verb == "delete" and event.outcome.endswith("keys"):
            for key in event.keys:
                self._deleted(key)

    def _created(self, key: str) -> None:
        lake_id = self.identity.lake_id
        if key.startswith(log_prefix(lake_id)):
            version = number_of(log_prefix(lake_id), key)
            assert version is not None
            if version <= self.state.version:
                self.counts["zombie slots"] += 1
                self.require(
                    version < self.floor_version, f"{key} was free at or above the floor and is taken again"
                )
            else:
                self._committed(key)
        elif key.startswith(floor_prefix(lake_id)):
            self._floor_raised(key)
        elif key.startswith(consumers_prefix(lake_id)):
            group = key[: key.rindex("/") + 1]
            if not self.shared.select(group, key, 1):
                self.newest_records.add(decode_consumer(self.shared.objects[key], key)[1].record_id)

    def _committed(self, key: str) -> None:
        body = self.shared.objects[key]
        commit = decode_commit(body, key)
        try:
            applied = apply(self.state, commit, body)
        except StepfsError as error:
            self.blame(f"{key} does not continue the log: {error}")
            return
        before, self.state = self.state, applied.state
        self.digests.append(self.state.digest)
        self.counts[f"{commit.kind} commits"] += 1
        self.require(not before.sealed, f"{key} follows the seal")
        known = before.producers.get(commit.producer_id)
        if commit.kind is CommitKind.EPOCH:
            self.require(
                known is None or (commit.next_seq, commit.position) == (known.next_seq, known.position),
                f"{key}: an epoch commit changed what its producer has done",
            )
            if commit.retired:
                self.farewells.add((commit.producer_id, commit.epoch))
        for number, tgb in enumerate(commit.tgbs):
            entry = StepEntry(
                type(commit.first_step)(commit.first_step + number),
                commit.version,
                commit.time_ms,
                commit.producer_id,
                commit.epoch,
                tgb,
            )
            self.steps.append(entry)
            self._step_of_key[tgb.key] = entry.step
            self._published(key, entry)
        if commit.tgbs:
            self._position(key, commit)

    def _published(self, key: str, entry: StepEntry) -> None:
        """Durable before visible, and exactly the producer's next record."""
        stored = self.shared.objects.get(entry.tgb.key)
        if stored is None or len(stored) != entry.tgb.size:
            self.blame(f"{key} publishes step {entry.step}, whose object {entry.tgb.key} is not in the store")
            return
        number = self.published.get(entry.producer_id, 0)
        for index in range(entry.tgb.slices):
            ref = entry.tgb.slice(SliceIndex(index))
            found = stored[ref.offset : ref.offset + ref.length]
            self.require(
                crc32c(found) == ref.crc32c, f"{key}: step {entry.step} slice {index} has another checksum"
            )
            self.require(
                found == payload(entry.producer_id, number, index),
                f"{key}: step {entry.step} slice {index} is {found!r}, but record {number} of {entry.producer_id} comes "
                "next: lost, doubled or out of order",
            )
        self.published[entry.producer_id] = number + 1

    def _position(self, key: str, commit: Commit) -> None:
        expected = self.published[commit.producer_id]
        self.require(
            msgpack.unpackb(commit.position) == expected,
            f"{key}: position {commit.position!r} is not that of its last record {expected}",
        )

    def _floor_raised(self, key: str) -> None:
        _, record = decode_floor(self.shared.objects[key], key)
        former, self.floor = self.floor, record
        if former is not None:
            self.require(
                record.floor >= former.floor and record.first_live_step >= former.first_live_step,
                f"{key}: the floor went backwards",
            )
        self.require(record.closing >= record.first_live_step, f"{key}: closes below its first live step")
        if record.first_live_step > (former.first_live_step if former else 0):
            self.counts["reclaims"] += 1
            self.require(
                former is not None and former.closing >= record.first_live_step,
                f"{key}: gives up steps below {record.first_live_step} that the record before did not announce",
            )
        self.require(
            record.floor <= max(self.state.version, 0), f"{key}: floor {record.floor} above the head"
        )
        self.require(
            record.first_live_step <= self.first_needed,
            f"{key}: gives up steps below {record.first_live_step}, but {self.promises} were promised",
        )
        if self.steps and record.first_live_step < len(self.steps):
            version = self.steps[record.first_live_step].version
            self.require(
                record.floor <= version, f"{key}: floor {record.floor} passes live version {version}"
            )

    def _deleted(self, key: str) -> None:
        lake_id = self.identity.lake_id
        step = self._step_of_key.get(key)
        if key.startswith(data_prefix(lake_id)):
            self.counts["deleted data"] += 1
            self.require(
                step is None or (step < self.first_needed and step < self.first_live_step),
                f"{key} of step {step} was deleted; needed from {self.first_needed}, live from {self.first_live_step}",
            )
            return
        for prefix in (log_prefix(lake_id), snapshot_prefix(lake_id)):
            number = number_of(prefix, key)
            if number is not None:
                self.require(
                    number < self.floor_version, f"{key} was deleted; the floor is {self.floor_version}"
                )
                return
        segment = segment_of_key(lake_id, key)
        if segment is None:
            segment = segment_of_entries_key(lake_id, key)
        if segment is not None:
            self.require(
                (segment + 1) * self.segment_steps <= self.first_live_step, f"{key} holds live steps"
            )
        elif key.startswith(consumers_prefix(lake_id)):
            group = key[: key.rindex("/") + 1]
            later = self.shared.select(group, key, 1)
            self.require(bool(later), f"{key}, the newest record of its group, was deleted")
        else:
            self.require(key.startswith("probe/") or "/nodes/" in key, f"{key} was deleted")
            self.require(key != LAKE, "the lake's identity was deleted")

    def check_reader(self, who: str, state: LogState, first_live_step: int) -> None:
        """A published state of any reader is a state of the one history, at one of its versions."""
        known = state.version < len(self.digests) and (
            state.version < 0 or self.digests[state.version] == state.digest
        )
        self.require(known, f"{who} publishes version {state.version} of another history")
        self.require(
            first_live_step <= self.first_live_step, f"{who} says {first_live_step} is the first live step"
        )

    def check_entry(self, who: str, entry: StepEntry) -> None:
        """Every reader sees the same TGB at a step."""
        truth = self.steps[entry.step] if entry.step < len(self.steps) else None
        self.require(entry == truth, f"{who} sees {entry} at step {entry.step}, the log has {truth}")

    def check_record(self, who: str, record_id: bytes) -> None:
        """What a group writer was told is recorded was, for a moment at least, what everybody read."""
        self.require(record_id in self.newest_records, f"{who} was told of a record that nobody reads")

    def head_key(self, version: int) -> str:
        return numbered(log_prefix(self.identity.lake_id), Version(version))
