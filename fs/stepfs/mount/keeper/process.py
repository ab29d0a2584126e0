"""The keeper's own program: one process a mount, which starts every daemon and decides which of them serves.

It holds the device, the state and the lock of the cache; a daemon is its child with one socket, and says

    hello, waiting, mounted, ready, seen, settled, stopped, serving, notify, ended      and hears
    start, know, see, settle, go on, stop, serve, end, hurry, resend

One road for the first start, a replacement and a death: start → ready → (the one before: settle, stop → stopped) → serve →
serving → (the one before: end). If the next one fails before `serving`, the one before hears `serve` again, or the next is
started. The end of a daemon is a death, unless it was asked for: then the mount ends.

Arguments: the descriptor of a roll, which says everything that this process knows (`Keeper.roll`); the mount point, for
people who look at processes. `--check`: only be imported, before another version of this program takes the process over.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepfs import __version__
from stepfs.mount.host.abort import abort_handle, abort_mount, detach, may_force_unmount, places_of
from stepfs.mount.keeper.address import is_there, leave, listen, places
from stepfs.mount.keeper.child import GONE_S, Child, spawn
from stepfs.mount.keeper.control_socket import Door
from stepfs.mount.keeper.messages import (
    HELD,
    SPEAKS,
    GarbageError,
    agree,
    close,
    document,
    read_document,
    receive,
    send,
)

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PAUSES_S = (0.0, 0.1, 0.5, 2.0, 5.0)  # before an attempt to have another daemon serve; the last one again and again
PAUSE_SHARE = 1 / 8  # of the time since the death, where the store is away and that is more
BEAT_S = 10.0  # to the supervisor, while no daemon says it
LIMITS = {  # of a spec that does not say: `stepfs.mount.launch` does
    "deaths": 3, "within_s": 60.0, "patience_s": 30.0, "unreachable_s": 300.0, "answer_s": 20.0, "serves_s": 10.0,
    "unreachable": 6, "log_bytes": 8 << 20,
}  # fmt: skip
INTERRUPTED = 128 + signal.SIGINT
REFUSED, NO_PROCESS = 4, 1  # exit codes

LOGGER = "stepfs.keeper"

Said = dict[str, Any]


class Keeper:
    """One mount, from the first start of a daemon to its end."""

    def __init__(self, roll: Said) -> None:
        self.directory: str = roll["directory"]
        self.mount: Said | None = roll.get("mount")  # the device's number, the kernel's INIT and the reply, the cache
        self.counts: dict[str, int] = roll.get("counts") or {"generation": 0, "handovers": 0, "recoveries": 0}
        self.follows: int | None = roll.get("follows")
        self.stands_in: bool = roll.get("stands_in", False)  # started by a daemon whose keeper was killed
        self.oom: int = roll.get("oom", 0)
        self.crashed: bool = roll.get("crashed", False)  # the daemon that serves has followed a dead one
        self.deaths: list[float] = roll.get("deaths", [])
        held = {name: roll.get(name, -1) for name in HELD}
        for descriptor in held.values():
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
        self.spec_fd: int = held["spec"]
        self.spec = read_document(self.spec_fd)
        self.state: int = held["state"]  # of the daemon that mounts
        self.device, self.lock, self.abort, self.then = (held[name] for name in ("device", "lock", "abort", "then"))
        self.asker = socket.socket(fileno=held["asker"]) if held["asker"] >= 0 else None  # of the first start
        self.listening = socket.socket(fileno=held["listening"]) if held["listening"] >= 0 else None
        self.serving: Child | None = None
        self.next: Child | None = None
        self.spare: Child | None = None
        self.draining: list[Child] = []  # they answer what they had read
        self.stage = ""  # of the road
        self.door = Door(self)
        self.owes_resend = False  # the one that is about to serve sends again what a dead one had read
        self.leaves_cache = False  # the next mount adopts it
        self.recovery: Said | None = None
        self.renewal: int | None = None  # a process that tries the next version of this program
        self.tried: list[str] = []  # the command of that
        self.renews = False
        self.timers: dict[str, tuple[float, Callable[[], None]]] = {}
        self.signal = 0
        self.code: int | None = None
        self.words = ""  # why it ends, for the one who started it
        self.waking, waked = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waked, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, _nothing)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGCHLD))
        daemon = roll.get("served_by")
        if held["daemon"] >= 0 and daemon is None:  # one that is imported, and idle
            self.spare = Child(socket.socket(fileno=held["daemon"]), self.spec_fd, "spare")
        elif daemon is not None:
            self.serving = Child(socket.socket(fileno=held["daemon"]), self.spec_fd, "first")
            self.serving.meet(*daemon)
            if self.device >= 0 and self.listening is None:  # it stands in for one that was killed
                self._listen()
            send(self.serving.sock, {"do": "know", **self._known()})
            if self.then >= 0:
                given, self.then = self.then, -1
                self.start("replace", given, self.asker)
            self._keep_a_spare()

    @property
    def limits(self) -> dict[str, float]:
        given: dict[str, float] = self.spec.get("limits", {})
        return LIMITS | given

    # -- its own life

    def run(self) -> int:
        if self.serving is None and self.next is None:
            self.start("first", self.spec_fd, self.asker)
        while self.code is None:
            self._turn()
        self._close()
        return self.code

    def _watched(self) -> dict[int, Callable[[], None]]:
        """What may happen next, and what to do then."""
        watched: dict[int, Callable[[], None]] = {self.waking: self._signalled}
        for child in self._children():
            watched[child.sock.fileno()] = lambda child=child: self._heard(child)  # type: ignore[misc]
            if child.alive >= 0:
                watched[child.alive] = lambda child=child: self._gone(child)  # type: ignore[misc]
        if self.listening is not None and "door" not in self.timers:
            watched[self.listening.fileno()] = lambda sock=self.listening: self.door.accept(sock)  # type: ignore[misc]
        for client in self.door.clients:
            watched[client.fileno()] = lambda client=client: self.door.asked(client)  # type: ignore[misc]
        if self.device >= 0 and self.serving is None:
            watched[self.device] = lambda: self._finish(0)
        return watched

    def _turn(self) -> None:
        watched, poll = self._watched(), select.poll()
        for descriptor in watched:
            poll.register(descriptor, 0 if descriptor == self.device else select.POLLIN)  # of the device only its end
        now = time.monotonic()
        until = min((at for at, _ in self.timers.values()), default=None)
        ready = poll.poll(None if until is None else max(0.0, 1000 * (until - now)))
        for descriptor, _ in ready:
            if self.code is None:
                watched[descriptor]()
                break  # whatever it was, what is watched may have changed
        if not ready:
            now = time.monotonic()
            for name, (at, act) in list(self.timers.items()):
                if at <= now and self.code is None:
                    self.timers.pop(name, None)
                    act()

    def after(self, name: str, seconds: float, act: Callable[[], None]) -> None:
        self.timers[name] = (time.monotonic() + seconds, act)

    def _children(self) -> list[Child]:
        return [child for child in (self.serving, self.next, *self.draining, self.spare) if child is not None]

    def _notify(self, text: str) -> None:
        """The supervisor, if it is systemd."""
        address = os.environ.get("NOTIFY_SOCKET", "")
        if address:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, suppress(OSError):
                sock.setblocking(False)
                sock.connect(address.replace("@", "\0", 1))
                sock.send(text.encode())

    def _say(self, line: str, level: str = "WARNING") -> None:
        """Into the log; its disk may be full."""
        if self.spec.get("json"):
            line = json.dumps({"level": level, "logger": LOGGER, "mount": self.directory, "message": line})
        else:
            line = f"{time.strftime('%Y-%m-%d %H:%M:%S')},{int(time.time() % 1 * 1000):03} {level} {LOGGER}: {line}"
        with suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))

    def _beat(self) -> None:
        """While no daemon serves, this process is the sign of life."""
        if self.serving is None:
            self._notify("WATCHDOG=1")
            self.after("beat", BEAT_S, self._beat)

    def _signalled(self) -> None:
        with suppress(OSError):
            for number in os.read(self.waking, 64):
                if number in ENDING:
                    self._end(number)
        self._reap()

    def _reap(self) -> None:
        """This process may be the first of a container."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self.renewal:
                self.renewal = None
                if self.tried != self.spec["keeper"]:
                    self.renew_soon()  # another one came meanwhile
                elif os.waitstatus_to_exitcode(status) == 0:
                    self._renew()
                else:
                    self.renews = False
                    self._say("the next version of the keeper cannot be started: this one goes on")

    def _end(self, number: int) -> None:
        """A signal, or a wish: the mount ends."""
        self.signal = number
        self._notify("STOPPING=1")
        if self.next is not None and self.serving is not None:
            self._fail(self.next, "the mount ends")
        found = self.serving or self.next
        if found is not None and not (self.recovery and found is self.next):
            with suppress(OSError):
                signal.pidfd_send_signal(found.process, number)
        else:
            self.give_up(0)

    def give_up(self, code: int) -> None:
        """Detach, since no daemon is there to do it."""
        if self.mount is not None:
            detach(self.mount["device"])
        self._finish(code)

    def _cut(self, why: str) -> None:
        """Readers get errors, and do not hang."""
        done = False
        with suppress(OSError):
            done = self.abort >= 0 and os.write(self.abort, b"1") == 1
        if not done and self.mount is not None:
            for place, number in places_of(self.mount["device"]):
                done = done or abort_mount(place, number)
        self.leaves_cache = True
        expected = not self.spec.get("recover", True) or not (self.mount or {}).get("resends")
        level = "INFO" if expected else "WARNING"
        how = "the connection was aborted" if done else "the connection ends"
        self._say(f"{self.directory}: {why}; {how}, so that readers fail and do not hang", level)
        self._finish(1)

    def _finish(self, code: int) -> None:
        if self.signal == signal.SIGINT and code == 0 and self.spec.get("foreground"):
            code = INTERRUPTED
        self.code = code

    def _close(self) -> None:
        for child in self.draining:  # nobody asks them any more, and they clean up
            select.select([child.alive], [], [], GONE_S)
        for child in self._children():
            child.kill()
            child.close()
        close([self.device, self.abort])
        if self.mount is not None and self.listening is not None:
            leave(self.mount["device"], self.listening)
        if self.lock >= 0 and self.mount is not None and self.mount.get("cache") and not self.leaves_cache:
            _remove_cache(*self.mount["cache"])  # of a daemon that has not lived to do it
        for client in self.door.clients:
            send(client, {"ended": True, "error": "the mount has ended", "exit_code": REFUSED, "announced": True})

    # -- daemons

    def start(self, how: str, spec: int, asker: socket.socket | None = None) -> None:
        """Have a daemon start: the first, one that replaces, or one that follows a dead one."""
        self.counts["generation"] += 1
        fits = self.spare is not None and how in {"first", "follow"} and self.spare.spec == spec
        child = self.spare if fits else None
        if child is not None:
            self.spare, child.how = None, how
        else:
            try:
                child = spawn(how, spec, self.directory)
            except (OSError, LookupError, TypeError, ValueError) as error:
                if spec != self.spec_fd:
                    close([spec])
                line = f"no daemon can be started ({getattr(error, 'strerror', None) or error!r})"
                return self._failed(asker, {"line": line, "code": NO_PROCESS, "announced": True})
        child.asker = asker
        self.next = child
        if child.version:
            self._introduce(child)
        return None

    def _introduce(self, child: Child) -> None:
        """It is imported, and told what it is to do."""
        counts = dict(self.counts)
        if child.how != "first":
            counts["recoveries" if child.how == "follow" else "handovers"] += 1
        before = self.serving.pid if self.serving is not None else self.follows
        body: Said = {
            "do": "start", "speaks": SPEAKS, "how": child.how, "counts": counts, "follows": before, "mount": self.mount,
            "keeper": os.getpid(), "oom": self.oom, "needs": (self.mount or {}).get("needs", []),
            "crashed": child.how == "follow",
        }  # fmt: skip
        held = {"spec": child.spec, "state": self.state, "lock": self.lock}
        body["held"] = [name for name, number in held.items() if number >= 0]
        send(child.sock, body, [number for number in held.values() if number >= 0])

    def _heard(self, child: Child) -> None:
        try:
            said, given = receive(child.sock)
            if said:
                act = getattr(self, f"_on_{said.get('say', '')}", None)
                kept = act(child, said, given) if act is not None else None
                close(number for number in given if number not in (kept or ()))
                return
        except (GarbageError, LookupError, TypeError, ValueError) as error:
            self._say(f"pid {child.pid} says what no daemon says ({error})")
            child.kill()
        if child.alive >= 0 and not select.select([child.alive], [], [], GONE_S)[0]:
            child.kill()  # it has closed its socket, and lives: no daemon does that
        self._gone(child)

    def _on_hello(self, child: Child, said: Said, _: Sequence[int]) -> None:
        child.meet(said["pid"], said["thread"])
        child.version = said["version"]
        if not agree(said):
            line = f"version {child.version} speaks with keepers in another manner than this one does: unmount, and mount again"
            child.last = {"line": line, "code": REFUSED, "announced": True}
            child.kill()
        elif child is self.next:
            self._introduce(child)

    def _on_waiting(self, child: Child, said: Said, _: Sequence[int]) -> None:
        child.last = {**child.last, "waiting": said["waiting"]}
        if child.asker is not None:
            send(child.asker, {"waiting": said["waiting"]})
        if self.recovery is not None:
            self.recovery["why"] = said["waiting"]
            if said.get("silent"):
                self.recovery["until"] = self.recovery["at_most"]
                self.after("patience", self.recovery["until"] - time.monotonic(), self._impatient)

    def _on_mounted(self, child: Child, said: Said, given: Sequence[int]) -> Sequence[int]:
        """Of the first daemon: the device, and what the kernel and it have agreed on."""
        self.mount, self.device, self.state = said["mount"], *given[:2]
        self.lock = given[2] if len(given) > 2 else -1
        self._listen()
        self.spec_fd, self.spec = child.spec, read_document(child.spec)
        send(child.sock, {"do": "know", **self._known()})
        return given

    def _change_cache(self, said: Said, given: Sequence[int], *, alone: bool) -> None:
        """To that of the daemon which serves now; the one before removes its own, if it lives to do it."""
        assert self.mount is not None
        if said.get("inherits") or (alone and not given):  # a disk that does not answer now may at the end
            return
        if alone and self.mount.get("cache"):
            _remove_cache(*self.mount["cache"])
        close([self.lock])
        self.lock = given[0] if given else -1
        self.mount = {**self.mount, "cache": said.get("cache")}

    def _listen(self) -> None:
        """Be there for those who ask, and be able to cut the connection."""
        assert self.mount is not None
        with abort_handle(self.mount["device"]) as handle:
            close([self.abort])
            self.abort = -1 if handle is None else os.dup(handle)
        try:
            self.listening = listen(self.mount["device"])
        except OSError as error:
            self._say(f"{self.directory} cannot be replaced while it serves: {error.strerror or error}")

    def _known(self) -> Said:
        """What a daemon must know of this process: whether it can cut the connection, and where it listens."""
        place = None if self.listening is None else str(places()[0])
        return {"guarded": self.abort >= 0 or may_force_unmount(), "keeper": os.getpid(), "place": place}

    def _on_ready(self, child: Child, _: Said, __: Sequence[int]) -> None:
        child.ready = True
        self._advance()

    def _advance(self) -> None:
        """Whatever holds the road up has gone: the next step."""
        new, old = self.next, self.serving
        if new is None or not new.ready or self.stage:
            return
        if self.draining and self.mount is not None and self.mount["resends"]:  # a request is answered once
            for child in self.draining:
                send(child.sock, {"do": "hurry"})
        elif old is None:
            self._serve(new)
        else:
            self.stage = "settling"
            send(old.sock, {"do": "settle"})
            self.after("road", self.limits["answer_s"], self._late)

    def _on_settled(self, child: Child, said: Said, _: Sequence[int]) -> None:
        if child is self.serving and self.next is not None and self.stage in {"settling", "stopping"}:
            self.stage = "seeing"
            send(self.next.sock, {"do": "see", "version": said["version"]})
            self.after("road", self.limits["answer_s"], self._late)

    def _on_seen(self, child: Child, said: Said, _: Sequence[int]) -> None:
        if child is self.next and self.serving is not None and self.stage == "seeing":
            self.stage = "stopping"
            send(self.serving.sock, {"do": "stop", "seen": said["version"]}, [child.alive] if child.alive >= 0 else [])
            self.after("road", self.limits["answer_s"], self._late)

    def _on_refused(self, child: Child, said: Said, _: Sequence[int]) -> None:
        """The one that serves gives nothing away now."""
        if child is self.serving and self.next is not None:
            self._fail(self.next, said["line"])

    def _on_stopped(self, child: Child, _: Said, __: Sequence[int]) -> None:
        if child is self.serving:
            child.stopped = True
            if self.next is not None and self.stage == "stopping":
                self._serve(self.next)
            else:  # it was too late: nobody waits for it
                self._read_on(child, "the next daemon was given up")

    def _serve(self, new: Child) -> None:
        self.stage = "serving"
        crashed = self.serving is None and new.how != "first"
        before = [self.serving.alive] if self.serving is not None else []
        died_s = self.deaths[-1] if crashed and self.deaths else None
        send(new.sock, {"do": "serve", "crashed": crashed, "died_s": died_s, **self._known()}, [self.device, *before])
        self.after("road", self.limits["serves_s"], self._late)

    def _on_serving(self, new: Child, said: Said, given: Sequence[int]) -> Sequence[int]:
        if new is not self.next:
            return ()
        old, crashed = self.serving, self.serving is None and new.how != "first"
        if self.mount is not None and new.how != "first":
            self._change_cache(said, given, alone=old is None)
        if self.owes_resend:
            self.owes_resend = False
            send(new.sock, {"do": "resend"})
        self.serving, self.next, self.stage, self.recovery = new, None, "", None
        if new.how != "first":
            self.counts["recoveries" if crashed else "handovers"] += 1
        self.crashed = crashed
        for name in ("road", "patience", "retry", "beat"):
            self.timers.pop(name, None)
        self.renews = new.spec != self.spec_fd or new.version != __version__
        if new.spec != self.spec_fd:
            close([self.spec_fd])
            self.spec_fd, self.spec = new.spec, read_document(new.spec)
            if self.spare is not None:
                self.spare.kill()
                self._bury(self.spare)
        for asker in {self.asker, new.asker} - {None}:
            self._answer(asker, {"pid": new.pid, "keeper": os.getpid()})
        self.asker = None
        self.follows = new.pid
        self._notify("READY=1")
        if old is not None:
            self.draining.append(old)
            send(old.sock, {"do": "end", "keeps_cache": said.get("inherits", False), "pid": new.pid})
        self._keep_a_spare()
        self.renew_soon()
        return given

    def _on_notify(self, child: Child, said: Said, _: Sequence[int]) -> None:
        if child is self.serving or (child is self.next and child.how == "first"):
            self._notify(said["text"])
        if self.listening is not None and self.mount is not None and not is_there(self.mount["device"]):
            self.listening.close()
            self.listening = None
            self._listen()
        if self.spec.get("log"):
            with suppress(OSError):  # a log that cannot be renamed, as a file mounted by itself, is still a log
                self._shorten(Path(self.spec["log"]))

    def _shorten(self, log: Path) -> None:
        """Begin the log anew at its bound; daemons follow its name."""
        found = os.fstat(2)
        if found.st_size > self.limits["log_bytes"] and os.path.samestat(found, log.lstat()):
            log.rename(f"{log}.1")
            fresh = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            os.dup2(fresh, 2)
            os.close(fresh)

    def _on_ended(self, child: Child, said: Said, _: Sequence[int]) -> None:
        """Its last words; it may take a while to clean up."""
        child.last = said

    def _last_words(self, child: Child) -> str:
        """How it has ended, by what it said before."""
        with suppress(OSError, GarbageError):
            child.sock.setblocking(False)
            while True:
                said, given = receive(child.sock)
                if not said:
                    break
                if said.get("say") == "ended":
                    child.last = said
                elif child is self.next and said.get("say") == "mounted":
                    given = [one for one in given if one not in self._on_mounted(child, said, given)]
                close(given)
        return str(child.last.get("how", ""))

    def _gone(self, child: Child) -> None:
        """It reads no more."""
        how = self._last_words(child)
        if child is self.spare:
            self._bury(child)
            self.after("spare", PAUSES_S[-1], self._keep_a_spare)
        elif child in self.draining:
            self._bury(child)
            if self.serving is not None and how != "given":
                send(self.serving.sock, {"do": "resend"})
            self._advance()
            self.renew_soon()
        elif child is self.next and child.how == "first" and self.mount is not None and not how:
            self._bury(child)
            self.asker = child.asker
            self._died(child)
        elif child is self.next:
            self._fail(child)
        elif how in {"unmounted", "signalled", "refused"}:
            self._wait_for(child)
            self._bury(child)
            close([self.lock])
            self.lock = -1
            if how == "refused":
                self.give_up(child.last["code"])
            self._finish(child.last.get("code", 0))
        else:
            self._bury(child)
            self._died(child)

    def _wait_for(self, child: Child) -> None:
        """For a process that ends by itself, and cleans up."""
        if child.process >= 0:
            select.select([child.process], [], [])

    def _bury(self, child: Child) -> None:
        child.close()
        if child in self.draining:
            self.draining.remove(child)
        for name in ("serving", "next", "spare"):
            if getattr(self, name) is child:
                setattr(self, name, None)

    def _died(self, child: Child) -> None:
        now, limits = time.monotonic(), self.limits
        self.deaths = [at for at in self.deaths if now - at < limits["within_s"]] + [now]
        if self.next is not None and self.stage == "serving":
            self.owes_resend = True
        else:
            self.stage = ""
        if self.device >= 0 and _has_ended(self.device):
            self._finish(0)
        elif self.signal:
            self.give_up(0)
        elif not self.spec.get("recover", True) or self.mount is None or not self.mount.get("resends"):
            self._cut("the daemon died")
        elif len(self.deaths) >= limits["deaths"]:
            self._cut(f"{len(self.deaths)} daemons died within {limits['within_s']:g} s")
        elif child.last.get("how") == "stuck" and self.crashed:
            self._cut("the daemon is stuck, and so was the one before")
        else:
            self.recovery = {
                "began": now, "until": now + limits["patience_s"], "at_most": now + limits["unreachable_s"],
                "attempts": 0, "why": "", "at": now,
            }  # fmt: skip
            self.after("patience", limits["patience_s"], self._impatient)
            self._beat()
            if self.next is None:
                self._attempt()
            else:  # one is about to take over
                self.next.how = "follow"
                self.timers.pop("road", None)
                self._advance()

    def _attempt(self) -> None:
        assert self.recovery is not None
        self.recovery["attempts"] += 1
        self.start("follow", self.spec_fd)

    def try_instead(self, spec: int, asker: socket.socket) -> None:
        """A better command, while none of the present one serves."""
        if self.next is not None:
            before, self.stage = self.next, ""
            before.kill()
            self._bury(before)
            if before.spec != self.spec_fd:
                close([before.spec])
            self._answer(before.asker, {"line": "another command is tried instead", "code": REFUSED, "announced": True})
        self.timers.pop("retry", None)
        self.start("follow", spec, asker)

    def _impatient(self) -> None:
        assert self.recovery is not None
        why = self.recovery["why"] or "none that was started has served"
        self._cut(f"the daemon died, and no other serves after {self.recovery['attempts']} attempts ({why})")

    def _late(self) -> None:
        """Somebody has not answered on the road."""
        assert self.next is not None
        if self.stage in {"settling", "stopping"}:
            self._fail(self.next, "the daemon that serves does not answer; look at its log")
        else:
            seconds = self.limits["serves_s" if self.stage == "serving" else "answer_s"]
            self._fail(self.next, f"did not serve for {seconds:g} s")

    def _fail(self, child: Child, why: str = "") -> None:
        """The daemon that was to serve does not: the one before serves on, or another is started."""
        child.kill()
        self._bury(child)
        stage, self.stage = self.stage, ""
        self.timers.pop("road", None)
        last = child.last if "line" in child.last else {}
        if why and "line" not in last:
            last = {"line": f"the mount is as it was: {why}", "code": REFUSED, "announced": True}
        if self.serving is not None:
            if self.serving.stopped:
                self._read_on(self.serving, f"pid {child.pid} {why or 'ended before it served'}")
            elif stage:
                send(self.serving.sock, {"do": "go on"})
        if child.spec != self.spec_fd:
            close([child.spec])
        self._failed(child.asker, last)

    def _read_on(self, child: Child, why: str) -> None:
        child.stopped = False
        send(child.sock, {"do": "serve", "why": why})

    def _failed(self, asker: socket.socket | None, last: Said) -> None:
        """What follows where a daemon did not come to serve: `last` are its last words, if it had any."""
        if self.recovery is not None:
            if asker is not None:
                self._answer(asker, last)
            self.recovery["why"] = last.get("line", "it ended without a word; see its log")
            now, away = time.monotonic(), last.get("code") == self.limits["unreachable"]
            pause = PAUSES_S[min(self.recovery["attempts"], len(PAUSES_S) - 1)]
            if away:
                self.recovery["until"] = self.recovery["at_most"]
                self.after("patience", self.recovery["until"] - now, self._impatient)
                pause = max(1.0, PAUSE_SHARE * (now - self.recovery["began"]))
            self.recovery["at"] = now + pause
            self.after("retry", pause, self._attempt)
        elif self.serving is not None:
            if asker is None:
                self._say(f"{self.directory}: {last.get('line', 'the next daemon ended without a word')}")
            self._answer(asker, last)
        else:  # the first
            self._answer(asker, last)
            self.words = "" if self.signal else last.get("line", "")
            if self.mount is not None:
                detach(self.mount["device"])
            self._finish(0 if self.signal else last.get("code", 1))

    def _answer(self, asker: socket.socket | None, last: Said) -> None:
        """Its question is answered; nothing, if the daemon had no last words."""
        if asker is None:
            return
        if "pid" in last:
            send(asker, last)
        elif "line" in last:
            send(asker, {"error": last["line"], "exit_code": last["code"], "announced": last.get("announced", False)})
        if asker is self.asker:
            self.asker = None
        self.door.leave(asker)

    def _keep_a_spare(self) -> None:
        if self.spec.get("spare") and self.spare is None and self.serving is not None:
            with suppress(OSError):
                self.spare = spawn("spare", self.spec_fd, self.directory)

    # -- the next version of this program

    def renew_soon(self) -> None:
        """Try it, before it takes this process over; not while anybody waits for an answer."""
        if self.renews and self.renewal is None and self.is_idle():
            with suppress(OSError):
                self.tried = self.spec["keeper"]
                self.renewal = os.posix_spawn(self.tried[0], [*self.tried, "--check"], dict(os.environ), setsigmask=())

    def is_idle(self) -> bool:
        alone = self.serving is not None and self.next is None and not self.draining
        return alone and not self.door.clients and self.recovery is None and self.code is None and not self.signal

    def _renew(self) -> None:
        if not self.is_idle():
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, signal.SIGCHLD))
        came = b""
        with suppress(BlockingIOError):  # the next program has no such pipe
            came = os.read(self.waking, 64)
        for number in {*came} & {*ENDING}:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGCHLD))
            self._end(number)
            return
        self.renews = False
        if self.spare is not None:
            self.spare.kill()
            self._bury(self.spare)
        roll = self.roll()
        numbers = [roll[name] for name in HELD if roll.get(name, -1) >= 0]
        for number in numbers:
            os.set_inheritable(number, True)
        found = document(roll)
        os.set_inheritable(found, True)
        try:
            os.execv(self.spec["keeper"][0], [*self.spec["keeper"], str(found), self.directory])  # noqa: S606
        except OSError as error:
            self._say(f"the next version of the keeper cannot be started ({error.strerror}): this one goes on")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*ENDING, signal.SIGCHLD))
        for number in numbers:
            os.set_inheritable(number, False)
        os.close(found)

    def roll(self) -> Said:
        """All that this process knows and holds, for the program that goes on with it."""
        assert self.serving is not None
        held = {
            "spec": self.spec_fd, "state": self.state, "device": self.device, "lock": self.lock, "abort": self.abort,
            "listening": -1 if self.listening is None else self.listening.fileno(), "daemon": self.serving.sock.fileno(),
        }  # fmt: skip
        return {
            "directory": self.directory, "mount": self.mount, "counts": self.counts, "follows": self.follows, "oom": self.oom,
            "served_by": [self.serving.pid, self.serving.thread], "crashed": self.crashed, "deaths": self.deaths,
            "stands_in": self.stands_in, **held,
        }  # fmt: skip


def _nothing(*_: object) -> None:
    pass


def _has_ended(device: int) -> bool:
    poll = select.poll()
    poll.register(device, 0)
    return bool(poll.poll(0))


def _remove_cache(path: str, keeps_base: bool) -> None:
    import shutil  # noqa: PLC0415 (seldom needed, and large)

    shutil.rmtree(path, ignore_errors=True)
    parent = Path(path).parent
    for made in (parent,) if keeps_base else (parent, parent.parent):
        with suppress(OSError):
            made.rmdir()


def _prefer_to_live() -> int:
    """As little as this user may be killed for want of memory; returns how it was before."""
    place = Path("/proc/self/oom_score_adj")
    before = int(place.read_text())
    for wanted in (-1000, -900, -500, -100):
        with suppress(OSError):
            place.write_text(str(wanted))
            break
    return before


def main(arguments: list[str]) -> int:
    if arguments[0] == "--check":
        return 0
    roll = read_document(number := int(arguments[0]))
    os.close(number)
    with suppress(OSError, ValueError):
        roll.setdefault("oom", _prefer_to_live())
    keeper = Keeper(roll)
    code = keeper.run()
    if keeper.words and keeper.spec.get("foreground"):
        line = keeper.words
        if keeper.spec.get("json"):
            line = json.dumps({"level": "ERROR", "logger": "stepfs", "mount": keeper.directory, "message": line})
        else:
            line = f"stepfs: {line}"
        with suppress(OSError):
            os.write(2, f"{line}\n".encode())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
