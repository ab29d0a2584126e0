"""How a daemon that serves gives its mount to the next one, as the keeper says, or reads on; and its way without a keeper."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import trio

from stepfs.mount.daemon.keeper_socket import Tie
from stepfs.mount.daemon.parts import SEEN_S, MountParts
from stepfs.mount.fuse.link import Link

_log = logging.getLogger("stepfs.mount")

SETTLE_S: Final = 4.0  # what is being fetched ahead comes, and into the page cache, before a mount is given away
DRAIN_S: Final = 5.0  # what a daemon that was replaced has not answered by then is sent to the next one, if that can be
_DRAINED_POLL_S: Final = 0.01
_KEEPER_S: Final = 30.0  # for a keeper to answer
_KEEPER_PAUSES_S: Final = (0.0, 0.1, 0.5, 2.0, 5.0, 30.0)  # before the next one of these seconds
_KEEPERS_WITHIN_S: Final = 60.0

Said = dict[str, Any]


@dataclass(eq=False)
class Succession:
    """Of one daemon, from its first answer on. One task: it takes and releases locks."""

    tie: Tie
    mount: MountParts
    link: Link
    writing: trio.Lock  # of the state
    know: Callable[[Said], None]  # what a keeper says of itself
    before: int  # of the daemon before: readable when that is dead; -1 if there is none
    _after: int = -1  # the same of the next one
    _stopped: bool = False  # reads nothing: the next one is about to
    _keepers: list[float] = field(default_factory=list)  # when one was started
    _quiet: AsyncExitStack = field(default_factory=AsyncExitStack)  # as long as the next one is about to serve

    async def run(self, background: trio.Nursery) -> Said:
        """Obey the keeper until the mount is another daemon's: its last words."""
        while True:
            said, given = await self.tie.hear()
            match said.get("do"):
                case "end":
                    return said
                case None if self._stopped and not await _ends(
                    self._after
                ):  # the keeper is gone, and the next one serves
                    return {"pid": "?", "keeps_cache": True}
                case None:
                    if self._stopped:
                        await self._read_on("the next daemon and the keeper have ended")
                    await self._go_on()
                    background.start_soon(self._outlive)
                    await self._start_keeper()
                case "know":
                    self.know(said)
                case "resend":
                    await self.link.read_on()
                case _:
                    await self._give_way(said, given)

    async def _give_way(self, said: Said, given: list[int]) -> None:
        """Steps on the way of another daemon, and back."""
        version = self.mount.log.state.version
        match said["do"]:
            case "settle" if self.mount.files.closing:
                self.tie.say("refused", line="it is about to be unmounted")
            case "settle":
                await self._settle()
                self.tie.say("settled", version=self.mount.log.state.version)
            case "stop" if version > said["seen"]:
                self.tie.say("settled", version=version)
            case "stop":
                await self._stop()
                self._stopped, self._after = True, given.pop() if given else -1
                self.tie.say("stopped")
            case "go on":
                await self._go_on()
            case "serve":
                await self._read_on(said["why"])
        close_all(given)

    async def _settle(self) -> None:
        """Nothing is lost by the next daemon's beginning: what is being fetched ahead comes first."""
        await self._go_on()
        self._quiet.callback(self.mount.slices.go_on)
        if self.mount.primer is not None:
            with trio.move_on_after(SETTLE_S):
                await self.mount.slices.settle()

    async def _go_on(self) -> None:
        await self._quiet.aclose()
        self._quiet = AsyncExitStack()

    async def _stop(self) -> None:
        """Read nothing any more, and leave the state to the next one."""
        await self._quiet.enter_async_context(self.writing)
        if self.mount.primer is not None:
            await self._quiet.enter_async_context(self.mount.primer.turn)
        self.mount.state.note(self.mount.readers())
        await self.link.stop()
        self.mount.waits.give(given=self.link.has_resend)
        self.mount.hand_over()

    async def _read_on(self, why: str) -> None:
        """The next one did not come to serve."""
        close_all([self._after])
        self._stopped, self._after = False, -1
        self.mount.take_back()
        self.mount.waits.give(given=False)
        await self.link.read_on()
        await self._go_on()
        _log.warning("%s: %s is served as before", why, self.mount.options.directory)

    async def _outlive(self) -> None:
        """What the daemon before has read and not answered is sent again: no keeper is there to say whether that is needed."""
        if self.before >= 0:
            before, self.before = self.before, -1
            await trio.lowlevel.wait_readable(before)
            os.close(before)
            await self.link.read_on()

    async def _start_keeper(self) -> None:
        """In place of one that was killed. Priming rests meanwhile: nobody could cut the connection."""
        _log.warning("the keeper of %s was killed: another one is started", self.mount.options.directory)
        async with AsyncExitStack() as resting:
            if self.mount.primer is not None:
                await resting.enter_async_context(self.mount.primer.turn)
            now = trio.current_time()
            self._keepers = [at for at in self._keepers if now - at < _KEEPERS_WITHIN_S]
            while True:
                await trio.sleep(_KEEPER_PAUSES_S[min(len(self._keepers), len(_KEEPER_PAUSES_S) - 1)])
                self._keepers.append(trio.current_time())
                if await self._starts_keeper():
                    return

    async def _starts_keeper(self) -> bool:
        try:
            self.tie.start_another()
        except OSError as error:
            _log.warning("no keeper can be started: %s", error)
            return False
        with trio.move_on_after(_KEEPER_S):
            said, _ = await self.tie.hear()
            if said.get("do") == "know":
                self.know(said)
                return True
        return False

    async def drain(self) -> None:
        """Answer what was read, as long as that may take. The next daemon has those sent again that wait for a commit, once
        nobody else is left.
        """
        close_all([self._after])
        if not self.link.has_resend:
            await trio.sleep_forever()
        with trio.move_on_after(DRAIN_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until_hurried, nursery.cancel_scope)
                while not 0 < self.mount.meter.held <= self.mount.waits.waiting:  # noqa: ASYNC110 -- counts tell nobody
                    await trio.sleep(_DRAINED_POLL_S)
                nursery.cancel_scope.cancel()

    async def _until_hurried(self, scope: trio.CancelScope) -> None:
        """Cancel `scope` when the keeper hurries, or has ended."""
        while (await self.tie.hear())[0].get("do") not in {"hurry", None}:
            pass
        scope.cancel()


async def _ends(other: int) -> bool:
    """Whether the next daemon ends, because its keeper did before it served: it has done so at once."""
    if other < 0:
        return False
    with trio.move_on_after(SEEN_S):
        await trio.lowlevel.wait_readable(other)
        return True
    return False


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)
