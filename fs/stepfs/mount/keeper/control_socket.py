"""What other programs ask a keeper: `stepfs mount`, `status`, `doctor`, `unmount`. Garbage costs its sender the connection."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stepfs.mount.keeper.address import peer_of
from stepfs.mount.keeper.messages import HELD, SPEAKS, GarbageError, agree, close, receive, send

if TYPE_CHECKING:
    from stepfs.mount.keeper.process import Keeper

CLIENTS_MAX = 64
FULL_S = 1.0  # without descriptors nobody is let in for so long
_REFUSED = 4  # exit code
_ELSEWHERE = "ask from the pid namespace of this mount's keeper, as with nsenter or kubectl exec"
_BUSY = "another daemon takes the mount over, or it is about to be unmounted; try again"
_CHANGED = "another daemon has taken the mount over meanwhile; try again"
_OWNED = "its supervisor would end it: replace it with `stepfs mount --replace`, which changes no process of it"
Said = dict[str, Any]


class Door:
    """Those who ask: only of this user, or root, and of this pid namespace."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.clients: list[socket.socket] = []

    def accept(self, listening: socket.socket) -> None:
        try:
            client, _ = listening.accept()
        except OSError:
            self._keeper.after("door", FULL_S, lambda: None)
            return
        if peer_of(client)[1] not in {0, os.geteuid()}:
            client.close()
            return
        if len(self.clients) >= CLIENTS_MAX:
            self.leave(self.clients[0])  # the one that has been there for longest
        self.clients.append(client)

    def asked(self, client: socket.socket) -> None:
        said, given = Said(), list[int]()
        with suppress(GarbageError, OSError):
            said, given = receive(client)
        questions = {"look": self._look, "replace": self._replace, "end": self._end, "take": self._give}
        act = questions.get(str(said.get("ask")))
        kept: Sequence[int] = ()
        if act is not None and agree(said) and peer_of(client)[0]:
            kept = act(client, said, given)
        else:
            if said and not peer_of(client)[0]:
                _refuse(client, _ELSEWHERE)
            elif said:
                by = f"version {said.get('version', '?')} asks"
                _refuse(client, f"{by} a keeper in another manner than this one knows: unmount, and mount again")
            self.leave(client)
        close(number for number in given if number not in kept)

    def leave(self, client: socket.socket) -> None:
        """It waits no longer; a daemon that it has asked for starts nevertheless."""
        waiting = self._keeper.next
        if waiting is not None and waiting.asker is client:
            waiting.asker = None
        if client in self.clients:
            self.clients.remove(client)
        client.close()
        self._keeper.renew_soon()

    def _look(self, client: socket.socket, _: Said, __: Sequence[int]) -> Sequence[int]:
        """How it stands, and how the daemon that serves was started."""
        keeper, found = self._keeper, self._keeper.recovery
        recovery, now = None, time.monotonic()
        if found is not None:
            recovery = {
                "attempts": found["attempts"], "why": found["why"], "until_s": round(max(0.0, found["until"] - now), 1),
                "next_s": None if keeper.next else round(max(0.0, found["at"] - now), 1),
            }  # fmt: skip
        body = {
            "keeper": os.getpid(), "pid": keeper.serving.pid if keeper.serving else None, "recovery": recovery,
            "handovers": keeper.counts["handovers"], "stands_in": keeper.stands_in, "speaks": SPEAKS,
            "foreground": bool(keeper.spec.get("foreground")),
        }  # fmt: skip
        send(client, body, [keeper.spec_fd])
        return ()

    def _replace(self, client: socket.socket, said: Said, given: Sequence[int]) -> Sequence[int]:
        """Start this command with these options."""
        keeper = self._keeper
        if keeper.signal or (keeper.next is not None and keeper.recovery is None):
            return _refuse(client, _BUSY)
        if not given or said.get("handovers") != keeper.counts["handovers"]:
            return _refuse(client, _CHANGED)
        if keeper.recovery is None:
            keeper.start("replace", given[0], client)
        else:
            keeper.try_instead(given[0], client)
        return given[:1]

    def _end(self, client: socket.socket, _: Said, __: Sequence[int]) -> Sequence[int]:
        """Unmount, where no daemon serves, and one attempt has failed."""
        keeper = self._keeper
        if keeper.serving is None and (keeper.recovery is None or keeper.recovery["why"]):
            keeper.give_up(0)
        else:
            send(client, {"pid": keeper.serving.pid if keeper.serving else None})
        return ()

    def _give(self, client: socket.socket, _: Said, __: Sequence[int]) -> Sequence[int]:
        """A supervisor's next start goes on with this mount; this process ends, and nothing else."""
        keeper = self._keeper
        self.clients.remove(client)  # else nothing would be idle
        if keeper.is_idle() and (keeper.stands_in or not keeper.spec.get("foreground")):
            roll = keeper.roll()
            names = [name for name in HELD if roll.get(name, -1) >= 0]
            if send(client, {"roll": roll, "names": names}, [roll[name] for name in names]):
                os._exit(0)
        _refuse(client, _OWNED)
        client.close()
        return ()


def _refuse(client: socket.socket, line: str) -> Sequence[int]:
    send(client, {"error": line, "exit_code": _REFUSED, "announced": True})
    return ()
