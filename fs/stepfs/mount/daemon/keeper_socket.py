"""A daemon's end of the socket to its keeper. The keeper's own program says in which order they speak."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, Final

import trio

from stepfs import __version__
from stepfs.errors import RefusedError
from stepfs.mount.keeper.messages import SPEAKS, GarbageError, agree, document, pair, read_document, receive, send

_NEEDS: Final = frozenset[str]()  # facts of a keeper that a daemon must understand, and this one does


class Tie:
    """What the keeper has given this daemon, and the way to speak to it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._thread = _idle_thread()
        self._keeper: subprocess.Popen[bytes] | None = None  # that this daemon has started
        self.start: dict[str, Any] = {}
        self.spec: dict[str, Any] = {}
        self.state, self.lock, self._spec = -1, -1, -1
        self.device = -1
        self.mount: dict[str, Any] | None = None
        self.follows: int | None = None
        self.keeper = 0  # its pid

    def begin(self) -> bool:
        """Say that this process is ready for anything, and wait for its task; False if the keeper has ended. `RefusedError`."""
        self._hello()
        self.start, given = receive(self._sock)
        if not self.start:
            return False
        held = dict(zip(self.start["held"], given, strict=True))
        self._spec, self.state, self.lock = (held.get(name, -1) for name in ("spec", "state", "lock"))
        self.spec = read_document(self._spec)
        self.mount, self.follows, self.keeper = (self.start.get(name) for name in ("mount", "follows", "keeper"))  # type: ignore[assignment]
        unknown = {*self.start.get("needs", ())} - _NEEDS
        if not agree(self.start) or unknown:
            needs = f" (it needs {', '.join(sorted(unknown))})" if unknown else ""
            raise RefusedError(
                f"the mount was made by a later version of stepfs{needs}: use that version, or mount again"
            )
        return True

    def _hello(self) -> None:
        self.say("hello", pid=os.getpid(), thread=self._thread, version=__version__, speaks=SPEAKS)

    def say(self, what: str, descriptors: Sequence[int] = (), **facts: object) -> bool:
        """False if the keeper has ended. Any thread."""
        return send(self._sock, {"say": what, **facts}, descriptors)

    def notify(self, text: str) -> None:
        """Something for a supervisor like systemd."""
        self.say("notify", text=text)

    async def hear(self) -> tuple[dict[str, Any], list[int]]:
        """The next message, which has `do`; an empty one if the keeper has ended."""
        await trio.lowlevel.wait_readable(self._sock)
        try:
            return receive(self._sock)
        except GarbageError:
            return {}, []

    def made(self, mount: dict[str, Any], device: int) -> None:
        """This daemon has mounted: from now on the keeper holds it, too."""
        self.mount, self.device = mount, device
        self.say("mounted", [device, self.state, *([self.lock] if self.lock >= 0 else [])], mount=mount)

    def start_another(self) -> None:
        """Another keeper, in place of one that was killed: with all that this daemon knows. OSError."""
        if self._keeper is not None:
            self._keeper.poll()
        ours, theirs = pair()
        held = {
            "spec": self._spec,
            "state": self.state,
            "device": self.device,
            "lock": self.lock,
            "daemon": theirs.fileno(),
        }
        roll = document(
            {
                "directory": self.spec["directory"], "mount": self.mount, "counts": self.start["counts"],
                "follows": os.getpid(), "oom": self.start["oom"], "served_by": [os.getpid(), self._thread],
                "crashed": self.start["crashed"], "stands_in": True, **held,
            }
        )  # fmt: skip
        numbers = [number for number in (*held.values(), roll) if number >= 0]
        try:
            self._keeper = subprocess.Popen(  # noqa: S603 (of our own start)
                [*self.spec["keeper"], str(roll), self.spec["directory"]],
                stdin=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                pass_fds=numbers,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(roll)
        self._sock.close()
        self._sock = ours


def _idle_thread() -> int:
    """The number of a thread that does nothing: it ends at once with this process, whatever the others wait for."""
    thread = threading.Thread(target=threading.Event().wait, name="stepfs idle", daemon=True)
    thread.start()
    assert thread.native_id is not None
    return thread.native_id
