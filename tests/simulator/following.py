"""What a mount does with a reader: poll, back off, look steps up, fetch slices; every answer compared with the ledger."""

from __future__ import annotations

import random

import trio
from crc32c import crc32c
from ledger import Ledger, payload

from stepfs.errors import CorruptError, StoreUnreachableError
from stepfs.follow.follower import IDENTITY_CHECK_S
from stepfs.format.ids import SliceIndex, Step
from stepfs.lake.log.reader import LogReader
from stepfs.store.api import Store

_IDLE_S = (0.2, 2.0)
_SKIMS = 0.3  # of looks: as where nobody waits


class Following:
    """Polls a reader as a mount does, backing off while idle, and checks all that it publishes."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name, self.ledger = name, ledger
        self._seen = 0
        self._looked_s = trio.current_time()
        self._rng = random.Random(f"{name} of {ledger.identity.lake_id}")

    async def until(self, reader: LogReader, step: int) -> None:
        """Return once `step` is committed as far as `reader` knows."""
        self._check(reader)
        idle_s = _IDLE_S[0]
        while reader.state.next_step <= step:
            if await self._polled(reader):
                self._check(reader)
                idle_s = _IDLE_S[0]
            else:
                await trio.sleep(idle_s)
                if trio.current_time() - self._looked_s > IDENTITY_CHECK_S:
                    await reader.check_history()
                    self._looked_s = trio.current_time()
                idle_s = min(2 * idle_s, _IDLE_S[1])

    async def _polled(self, reader: LogReader) -> bool:
        try:
            return await reader.poll(skims=self._rng.random() < _SKIMS)
        except StoreUnreachableError:
            if not self.ledger.era:
                raise
            return False  # a mount survives an outage, and may have known more than the store has when it is back

    def _check(self, reader: LogReader) -> None:
        self.ledger.check_reader(self.name, reader.state, reader.first_live_step)
        for step in range(max(self._seen, reader.first_live_step), reader.state.next_step):
            entry = reader.entry_if_loaded(Step(step))
            if entry is not None:
                self.ledger.check_entry(self.name, entry)
        self._seen = reader.state.next_step


async def read_step(
    name: str, ledger: Ledger, store: Store, reader: LogReader, step: Step, *, may_go: bool = False
) -> None:
    """Fetch and verify all slices of a step as a mount would. `may_go`: nobody promised that it stays."""
    try:
        entry = await reader.entry(step)
    except (StoreUnreachableError, CorruptError):
        raise  # who damaged the store on purpose knows whether this is to be expected
    except Exception as error:  # noqa: BLE001 - whatever it is, a step that was promised is not to be had
        gone = (may_go and step < ledger.first_live_step) or ledger.is_former_life
        ledger.require(gone, f"{name} cannot find step {step}: {type(error).__name__}: {error}")
        return
    ledger.check_entry(name, entry)
    number = entry.tgb.seq  # a producer of the simulation appends record n as its seq n
    for index in range(ledger.identity.slices):
        ref = entry.tgb.slice(SliceIndex(index))
        buffer = bytearray(ref.length)
        size = await store.read_into(entry.tgb.key, ref.offset, memoryview(buffer))
        if size is None and ((may_go and step < ledger.first_live_step) or ledger.is_former_life):
            return
        ledger.require(size == ref.length, f"{name} lost step {step} slice {index}: {entry.tgb.key} gave {size}")
        if size != ref.length:
            return
        ledger.require(
            crc32c(bytes(buffer)) == ref.crc32c and bytes(buffer) == payload(entry.producer_id, number, index),
            f"{name} read other bytes at step {step} slice {index}",
        )
