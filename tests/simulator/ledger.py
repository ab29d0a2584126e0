"""What must hold at every moment of a simulated run, checked as each request is carried out by the store.

The ledger knows the truth because it sees every write: it folds the log with the real `apply`, reads what each commit
publishes out of the store at that very moment, and remembers what was promised to whom. It never asks the actors.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgpack
from crc32c import crc32c
from doubles.faulty_store import Event, ObjectMap

from stepfs.errors import StepfsError
from stepfs.format.commit import Commit, CommitKind, decode_commit
from stepfs.format.control import NOTHING_YET, ControlRecord, GroupRecord, decode_control
from stepfs.format.identity import LakeIdentity
from stepfs.format.ids import SliceIndex, Version
from stepfs.format.keys import (
    LAKE,
    control_prefix,
    data_prefix,
    index_prefix,
    log_prefix,
    number_of,
    numbered,
    segment_of,
    snapshot_prefix,
)
from stepfs.format.snapshot import LogState, StepEntry, genesis
from stepfs.lake.log.apply import apply


def payload(producer_id: str, number: int, index: int) -> bytes:
    """Slice `index` of record `number`; says what it is, in a length that differs from its neighbours'."""
    return f"{producer_id} {number} {index} ".encode().ljust(24 + (number * 7 + index * 3) % 40, b".")


life_began_in: ContextVar[int] = ContextVar("the era in which this life of a process began", default=0)


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
    controls: list[ControlRecord] = field(default_factory=list)  # by number
    control_times_s: list[float] = field(default_factory=list)  # when each was created
    said: set[tuple[str, GroupRecord]] = field(default_factory=set)  # what a control record has said of a group
    graces_s: dict[str, float] = field(default_factory=dict)  # of reclaimers, by name
    asked: list[tuple[str, Callable[[], int]]] = field(default_factory=list)  # without an answer yet; see `giving_up`
    era: int = 0  # counts how often the store was put back
    former: Ledger | None = None  # what held in the era before

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

    def begin_era(self) -> None:
        """The store is put back: what a process tells that began before is no lie if it was true then."""
        self.former, self.era = copy.copy(self), self.era + 1
        for name, value in vars(self.former).items():
            if isinstance(value, list | dict) and name != "broken":
                setattr(self.former, name, copy.copy(value))

    @property
    def is_former_life(self) -> bool:
        """Whether a process asks that has known the log that was lost."""
        return life_began_in.get() < self.era

    def copied(self) -> Callable[[], None]:
        """Copy the store and the truth about it. The result puts the copy back: what came after it is lost, and was said."""
        objects = dict(self.shared.objects)
        kept = {
            "shared", "identity", "segment_steps", "stop", "broken", "counts", "graces_s", "said", "asked", "era", "former",
        }  # fmt: skip
        truth = {name: copy.copy(value) for name, value in vars(self).items() if name not in kept}

        def put_back() -> None:
            self.shared.put_back(objects)
            for name, value in truth.items():
                setattr(self, name, copy.copy(value))
            for group, of_copy in self.asked:
                self._give_up_of_copy(group, of_copy())

        return put_back

    @property
    def first_needed(self) -> int:
        """The least step promised to anybody; nothing from here on may go. Without promises, what groups that are being retired
        have on record.
        """
        if self.promises:
            self._given_up = min(self.promises.values())
        elif self.control.groups:
            return max(self._given_up, self.control.need)
        return self._given_up

    @property
    def control(self) -> ControlRecord:
        return self.controls[-1] if self.controls else NOTHING_YET

    @property
    def floor_version(self) -> int:
        return self.control.floor

    @property
    def first_live_step(self) -> int:
        return self.control.first_live_step

    def blame(self, what: str) -> None:
        """Record a broken invariant and end the run."""
        self.broken.append(what)
        self.stop()

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.blame(what)

    def promise(self, group: str, step: int) -> None:
        """From now on `group` may read from `step` on, whatever happens; but for what the store has lost."""
        if self.is_former_life:
            return
        self.promises[group] = step
        self.require(
            step >= self.first_live_step,
            f"group {group} was promised step {step}, but steps below {self.first_live_step} are reclaimed",
        )

    @contextmanager
    def giving_up(self, group: str, step: int | None, of_copy: Callable[[], int]) -> Iterator[None]:
        """While it asks, `group` needs nothing below `step`; None: it needs what it did. A process that has known the log that
        was lost asks this of the group as the older copy has it, `of_copy()`; so does one that waits for its answer while the
        store is put back. It may give up what that copy was promised, and is promised nothing.
        """
        asked = group, of_copy
        if self.is_former_life:
            self._give_up_of_copy(group, of_copy())
        elif step is not None:
            self.promises[group] = step
        self.asked.append(asked)
        try:
            yield
        finally:
            self.asked.remove(asked)

    def _give_up_of_copy(self, group: str, step: int) -> None:
        if group in self.promises:
            self.promises[group] = max(step, self.promises[group])

    def release(self, group: str) -> None:
        """The group is being retired: it needs nothing from now on."""
        _ = self.first_needed
        self.promises.pop(group, None)

    def _watch(self, event: Event) -> None:
        if event.fault == "landed late":
            self.counts["landed late"] += event.outcome in {"created", "put"}
        if event.outcome == "created":
            self._created(event.keys[0], event)
        elif event.verb == "delete" and event.outcome.endswith("keys"):
            for key in event.keys:
                self._deleted(key)

    def _created(self, key: str, event: Event) -> None:
        lake_id = self.identity.lake_id
        if key.startswith(log_prefix(lake_id)):
            version = number_of(log_prefix(lake_id), key)
            assert version is not None
            if version <= self.state.version:
                self.counts["zombie slots"] += 1
                self.require(version < self.floor_version, f"{key} was free at or above the floor and is taken again")
            else:
                self._committed(key)
        elif key.startswith(control_prefix(lake_id)):
            self._controlled(key, event)

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
                type(commit.first_step)(commit.first_step + number), commit.version, commit.time_ms,
                commit.producer_id, commit.epoch, tgb,
            )  # fmt: skip
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
            self.require(crc32c(found) == ref.crc32c, f"{key}: step {entry.step} slice {index} has another checksum")
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

    def _controlled(self, key: str, event: Event) -> None:
        """A control record was created: the next number, on the newest record, and nothing needed is given up."""
        number, former = number_of(control_prefix(self.identity.lake_id), key), self.control
        self.require(number == len(self.controls), f"{key} is created after record {len(self.controls) - 1}")
        _, record = decode_control(self.shared.objects[key], key)
        self.controls.append(record)
        self.control_times_s.append(event.time_us / 1e6)
        self.said |= set(record.groups.items())
        self.require(
            record.floor >= former.floor and record.first_live_step >= former.first_live_step,
            f"{key}: the floor went backwards",
        )
        if record.first_live_step > former.first_live_step:
            self.counts["reclaims"] += 1
            self._gives_up(key, record, event)
        self.require(record.floor <= max(self.state.version, 0), f"{key}: floor {record.floor} above the head")
        if self.steps and record.first_live_step < len(self.steps):
            version = self.steps[record.first_live_step].version
            self.require(record.floor <= version, f"{key}: floor {record.floor} passes live version {version}")

    def _gives_up(self, key: str, record: ControlRecord, event: Event) -> None:
        """Nothing that anybody was promised, nor anything that a group needed within the reclaimer's grace."""
        first = record.first_live_step
        gone = sum(entry.tgb.payload_bytes for entry in self.steps[:first])
        self.require(record.deleted_bytes == gone, f"{key}: {record.deleted_bytes} bytes given up, they are {gone}")
        self.require(
            first <= self.first_needed, f"{key}: gives up steps below {first}, but {self.promises} were promised"
        )
        grace_s = self.graces_s.get(event.actor.partition(".")[0], 0.0)
        for number, ended_s in enumerate(self.control_times_s[1:-1]):
            if ended_s > event.time_us / 1e6 - grace_s:
                self.counts["held by grace"] += self.controls[number].need < record.need
                self.require(
                    first <= self.controls[number].need or not self.controls[number].groups,
                    f"{key}: gives up steps below {first}, but record {number} needed {self.controls[number].need}",
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
                self.require(number < self.floor_version, f"{key} was deleted; the floor is {self.floor_version}")
                return
        segment = segment_of(index_prefix(lake_id), key)
        if segment is not None:
            self.require((segment + 1) * self.segment_steps <= self.first_live_step, f"{key} holds live steps")
        else:
            self.require(key.startswith("probe/") or "/nodes/" in key, f"{key} was deleted")
            self.require(key != LAKE, "the lake's identity was deleted")

    @property
    def _truths(self) -> tuple[Ledger, ...]:
        """What who asks may tell: a process that knew the log that was lost, also what was true then."""
        return (self,) if self.former is None or not self.is_former_life else (self, self.former)

    def check_reader(self, who: str, state: LogState, first_live_step: int) -> None:
        """A published state of any reader is a state of the one history, at one of its versions."""
        known = state.version < 0 or any(state.digest in one.digests[state.version :][:1] for one in self._truths)
        self.require(known, f"{who} publishes version {state.version} of another history")
        latest = max(one.first_live_step for one in self._truths)
        self.require(first_live_step <= latest, f"{who} says {first_live_step} is the first live step")

    def check_entry(self, who: str, entry: StepEntry) -> None:
        """Every reader sees the same TGB at a step."""
        truths = [one.steps[entry.step] if entry.step < len(one.steps) else None for one in self._truths]
        self.require(entry in truths, f"{who} sees {entry} at step {entry.step}, the log has {truths}")

    def check_record(self, who: str, group: str, record: GroupRecord) -> None:
        """What a group writer was told is recorded was, for a moment at least, what everybody read."""
        self.require((group, record) in self.said, f"{who} was told of a record that nobody reads")

    def head_key(self, version: int) -> str:
        return numbered(log_prefix(self.identity.lake_id), Version(version))
