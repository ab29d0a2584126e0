"""Bits that flip in what is stored, until somebody restores it; and which errors that explains.

A reader must never believe rotten bytes: every answer is still compared with the ledger, which took its knowledge from
the commits as they were made. What may happen is `CorruptError`, while the rot lasts. A rotten snapshot beside a
sound one may not even cause that, nor may a control record that is not the newest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio
from ledger import Ledger

from stepfs.errors import CorruptError, StepfsError
from stepfs.format.codec import Kind, decode
from stepfs.format.ids import Version
from stepfs.format.keys import LAKE, control_prefix, index_prefix, log_prefix, number_of, snapshot_prefix

_HEARD_LATER_S: Final = (
    360.0  # what was read before the repair may be reported so much after it: the longest freeze, and a time-out
)
_PREFIXES: Final[dict[str, Callable[[str], str]]] = {
    "control": control_prefix, "log": log_prefix, "index": index_prefix, "snapshot": snapshot_prefix,
    "lake": lambda _: LAKE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rot:
    """One flipped bit in some object of a kind ('control', 'log', 'index', 'snapshot', 'lake'), restored `lasts_s` later."""

    kind: str
    at_s: float
    lasts_s: float


class Damage:
    """What is rotten now, or was until a moment ago."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._excused_until_s = 0.0
        self._rotten: set[str] = set()

    async def inflict(self, rot: Rot, rng: random.Random) -> None:
        """Flip a bit of one object, wait, put it back. Nothing happens if there is none to choose."""
        await trio.sleep(rot.at_s)
        shared = self._ledger.shared
        shared.settle(trio.current_time())
        keys = self._choice(rot.kind)
        if not keys:
            return
        key = rng.choice(keys)
        whole = shared.objects[key]
        rotten = _flipped(whole, rng)
        shared.put(key, rotten)
        self._rotten.add(key)
        self._ledger.counts[f"rotten {rot.kind}"] += 1
        if rot.kind != "snapshot" and not (rot.kind == "control" and key != keys[-1]):
            self._excused_until_s = trio.current_time() + rot.lasts_s + _HEARD_LATER_S
        await trio.sleep(rot.lasts_s)
        self._rotten.discard(key)
        if shared.objects.get(key) == rotten:  # else it was reclaimed meanwhile
            shared.put(key, whole)

    def _choice(self, kind: str) -> list[str]:
        """Live objects of a kind; of snapshots only the newest, and only if an older one is confirmed as well."""
        prefix = _PREFIXES[kind](self._ledger.identity.lake_id)
        keys = [entry.key for entry in self._ledger.shared.select(prefix, "", None)]
        if kind != "snapshot":
            return [key for key in keys if key not in self._rotten]
        sound = self._sound_snapshots()
        return sound[-1:] if len(sound) > 1 else []

    def _sound_snapshots(self) -> list[str]:
        """Snapshots that a stranger can start from."""
        ledger = self._ledger
        prefix = snapshot_prefix(ledger.identity.lake_id)
        sound = []
        for entry in ledger.shared.select(prefix, "", None):
            version = number_of(prefix, entry.key)
            if version is None or version < ledger.floor_version or entry.key in self._rotten:
                continue
            digest = decode(Kind.SNAPSHOT, ledger.shared.objects[entry.key], entry.key).binary("digest")
            if ledger.digests[Version(version)] == digest:
                sound.append(entry.key)
        return sound

    def excuses(self, error: StepfsError) -> bool:
        """`CorruptError` while a commit or a segment is rotten, or while no sound snapshot is left.

        A reclaimer that needs a newer snapshot than the sound one may say so, and delete nothing; a replica that begins with
        the rotten one names it.
        """
        if not isinstance(error, CorruptError):
            return False
        if trio.current_time() <= self._excused_until_s:
            return True
        says = "nothing was deleted" in str(error) or any(key in str(error) for key in self._rotten)
        return bool(self._rotten) and (says or not self._sound_snapshots())


def _flipped(body: bytes, rng: random.Random) -> bytes:
    bit = rng.randrange(8 * len(body))
    changed = bytearray(body)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
