"""What the keeper makes of daemons that do not get ready, and of programs that speak to it, without a mount."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepfs.mount.keeper import address
from stepfs.mount.keeper.messages import SPEAKS, document, pair, receive, send
from stepfs.mount.keeper.process import PAUSES_S
from stepfs.mount.launch import keeper_command

FS = Path(address.__file__).parents[3]
DEVICE = f"0:{987_654 + os.getpid()}"  # tests of other processes have theirs: keepers listen in one directory
DAEMON = f"""
import os, socket, sys, threading, time
sys.path.append({str(FS)!r})
from itertools import pairwise
from pathlib import Path
from stepfs.mount.keeper.messages import *
here, sock = Path(sys.argv[-1]), socket.socket(fileno=int(sys.argv[-2]))
idle = threading.Thread(target=threading.Event().wait, daemon=True)
idle.start()
with (here / "started").open("a") as file:
    print(os.getpid(), time.monotonic(), file=file)
nth = len((here / "started").read_text().splitlines())
def say(what, given=(), **facts): send(sock, {{"say": what, **facts}}, given)
def hear(): return receive(sock)
say("hello", pid=os.getpid(), thread=idle.native_id, version="0", speaks=SPEAKS)
start, _ = hear()
if start["how"] == "first":
    say("mounted", [os.eventfd(0), os.eventfd(0)], mount={{"device": {DEVICE!r}, "resends": True, "lake_id": "x", "cache": None}})
    hear()
    say("serving")
"""
SERVES = """
else:
    say("ready")
    while hear()[0]["do"] != "serve":
        say("seen", version=0)
    say("serving")
while (said := hear()[0]):
    if said["do"] == "settle": say("settled", version=0)
    elif said["do"] == "stop": say("stopped")
    elif said["do"] == "end": say("ended", how="given", line="", code=0); break
"""


class Kept:
    """A keeper, and what it says to the program that has started it."""

    def __init__(self, tmp_path: Path, code: str, **limits: float) -> None:
        self.here, self.log = tmp_path, tmp_path / "log"
        (tmp_path / "daemon.py").write_text(DAEMON + textwrap.dedent(code))
        self.ours, theirs = pair()
        self.ours.settimeout(60)
        bounds = {
            "deaths": 3, "within_s": 60.0, "patience_s": 30.0, "unreachable_s": 300.0, "answer_s": 20.0, "serves_s": 10.0,
            "unreachable": 6, "log_bytes": 1 << 20,
        }  # fmt: skip
        self.spec = {
            "keeper": keeper_command(), "command": [sys.executable, "-I", "-S", str(tmp_path / "daemon.py")],
            "environment": {"PATH": os.environ["PATH"]}, "directory": str(tmp_path), "options": {}, "recover": True,
            "spare": False, "foreground": False, "json": False, "log": str(self.log), "limits": bounds | limits,
        }  # fmt: skip
        spec = document(self.spec)
        roll = document({"directory": str(tmp_path), "spec": spec, "asker": theirs.fileno()})
        with theirs, self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*keeper_command(), str(roll), str(tmp_path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                pass_fds=[spec, roll, theirs.fileno()],
            )  # fmt: skip
        os.close(spec)
        os.close(roll)

    def said(self) -> dict[str, Any]:
        return receive(self.ours)[0]

    @property
    def started(self) -> list[tuple[int, float]]:
        """The daemons: pid, and when."""
        lines = (self.here / "started").read_text().splitlines()
        return [(int(pid), float(at)) for pid, at in map(str.split, lines)]

    def asked(self, what: str, descriptors: tuple[int, ...] = (), **facts: object) -> dict[str, Any]:
        sock = address.connect(DEVICE, 60)
        assert sock is not None
        with sock:
            send(sock, {"ask": what, "speaks": SPEAKS, "version": "0", **facts}, descriptors)
            said, given = receive(sock)
            for number in given:
                os.close(number)
            return said

    def until(self, done, what: str) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, f"{what}: {self.log.read_text()}"
            time.sleep(0.01)


@pytest.fixture
def keep(tmp_path, monkeypatch):
    """Starts keepers, whose place is this user's own."""
    kept: list[Kept] = []

    def start(code: str, **limits: float) -> Kept:
        kept.append(Kept(tmp_path, code, **limits))
        return kept[-1]

    yield start
    for one in kept:
        one.process.kill()
        one.process.wait()
        one.ours.close()
        for pid, _ in one.started:
            _kill(pid)


def _kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_attempts_that_fail_have_pauses_between_them(keep):
    """Half an installation, or a machine without processes, is over in seconds: five attempts would be in milliseconds (K2)."""
    kept = keep("else:\n    sys.exit(1)\n" + "while hear()[0]: pass\n", patience_s=sum(PAUSES_S) - 0.2)
    assert "pid" in kept.said()
    os.kill(kept.started[0][0], signal.SIGKILL)
    assert kept.process.wait(60) == 1
    times = [at for _, at in kept.started[1:]]
    pauses = [later - before for before, later in pairwise(times)]
    assert 0 < len(pauses) <= 3  # 0.1, 0.5 and 2 s; the next one would be too late, on a busy machine one of these is
    assert all(pause >= wanted for pause, wanted in zip(pauses, (0.1, 0.5, 2.0), strict=False))
    assert f"no other serves after {len(times)} attempts (it ended without a word; see its log)" in kept.log.read_text()


def test_what_was_installed_in_the_meantime_serves(keep):
    kept = keep("elif nth < 4:\n    import half_installed\n" + SERVES)
    assert "pid" in kept.said()
    os.kill(kept.started[0][0], signal.SIGKILL)
    kept.until(lambda: kept.asked("look")["pid"] not in {None, kept.started[0][0]}, "nobody serves")
    assert len(kept.started) == 4


def test_a_store_that_is_away_is_waited_for_as_long_as_a_reader_waits(keep):
    away = """
    elif nth < 6:
        say("ended", how="failed", line="the store is away", code=6, announced=True)
        sys.exit(6)
    """
    kept = keep(textwrap.dedent(away) + SERVES, patience_s=3.0)  # a busy machine takes some to start a daemon
    assert "pid" in kept.said()
    os.kill(kept.started[0][0], signal.SIGKILL)
    kept.until(lambda: kept.asked("look")["pid"] not in {None, kept.started[0][0]}, "nobody serves")
    assert len(kept.started) == 6
    assert kept.started[-1][1] - kept.started[1][1] > 3.0, "its patience"


def test_garbage_costs_its_sender_the_connection_alone(keep):
    kept = keep(SERVES)
    assert "pid" in kept.said()
    for garbage in (
        b"\0",
        b"[]",
        b"{}",
        b"7",
        b'{"ask": 7}',
        b"{" * 60_000,
        b"x" * (1 << 17),
        json.dumps({"ask": "look"}).encode(),
    ):
        sock = address.connect(DEVICE, 60)
        assert sock is not None
        with sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            socket.send_fds(sock, [garbage], [0, 1])
            said = receive(sock)[0]
            assert said == {} or "asks a keeper in another manner" in said["error"]
    assert kept.asked("look")["pid"] == kept.started[0][0]
    assert len(os.listdir(f"/proc/{kept.process.pid}/fd")) < 20


def test_a_daemon_that_says_what_no_daemon_says_is_a_dead_one(keep):
    kept = keep(SERVES.replace("while (said", "if nth == 1: sock.send(b'garbage')\nwhile (said"))
    assert "pid" in kept.said()
    kept.until(lambda: len(kept.started) == 2 and kept.asked("look")["pid"] == kept.started[1][0], "it serves on")
    assert "says what no daemon says" in kept.log.read_text()


BROKEN = """
else:
    say("ended", how="failed", line="it is broken", code=1, announced=True)
    sys.exit(1)
while hear()[0]: pass
"""


def test_while_nobody_serves_it_says_why_and_a_better_command_takes_over(keep, tmp_path):
    kept = keep(BROKEN)
    assert "pid" in kept.said()
    os.kill(kept.started[0][0], signal.SIGKILL)
    kept.until(lambda: (kept.asked("look")["recovery"] or {}).get("attempts", 0) > 2, "no attempts")
    look = kept.asked("look")
    assert look["pid"] is None
    assert look["recovery"]["why"] == "it is broken"
    assert look["recovery"]["until_s"] <= 30
    (tmp_path / "better.py").write_text(DAEMON + SERVES)
    spec = document({**kept.spec, "command": [sys.executable, "-I", "-S", str(tmp_path / "better.py")]})
    said = kept.asked("replace", (spec,), handovers=0)
    os.close(spec)
    assert said["pid"] == kept.started[-1][0]
    assert kept.asked("look")["recovery"] is None


def test_one_that_does_not_come_to_serve_leaves_the_mount_to_the_one_before(keep):
    kept = keep(
        SERVES.replace('    say("serving")', '    time.sleep(600) if nth == 2 else say("serving")'), serves_s=0.5
    )
    first = kept.said()["pid"]
    spec = document(kept.spec)
    assert "did not serve for 0.5 s" in kept.asked("replace", (spec,), handovers=0)["error"]
    assert kept.asked("look")["pid"] == first
    assert kept.asked("replace", (spec,), handovers=0)["pid"] == kept.started[2][0]
    os.close(spec)


def test_it_executes_the_next_version_of_itself_and_knows_what_it_knew(keep, tmp_path):
    kept = keep(SERVES)
    kept.said()
    renewed = tmp_path / "renewed"
    marked = f"import sys; open({str(renewed)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10)); "
    *program, code, root = kept.spec["keeper"]
    spec = document({**kept.spec, "keeper": [*program, marked + code, root]})
    for count in range(2):
        assert "pid" in kept.asked("replace", (spec,), handovers=count)
        kept.until(renewed.exists, "it goes on as before")
        kept.until(lambda: "--check" not in ["--check", *renewed.read_text().splitlines()][-1], "it is only checked")
        (tmp_path / "renewed").unlink()
        look = kept.asked("look")
        assert (look["keeper"], look["handovers"]) == (kept.process.pid, count + 1)
    os.kill(kept.started[-1][0], signal.SIGKILL)
    kept.until(lambda: len(kept.started) == 4 and kept.asked("look")["pid"] == kept.started[3][0], "nobody follows")
    os.close(spec)


def test_a_next_version_that_cannot_be_imported_does_not_take_it_over(keep):
    kept = keep(SERVES)
    kept.said()
    *program, _, root = kept.spec["keeper"]
    spec = document({**kept.spec, "keeper": [*program, "import half_installed", root]})
    assert "pid" in kept.asked("replace", (spec,), handovers=0)
    kept.until(lambda: "cannot be started: this one goes on" in kept.log.read_text(), "nothing is said")
    assert kept.asked("look")["pid"] == kept.started[1][0]
    os.close(spec)


def test_a_socket_that_somebody_removes_is_made_again(keep):
    kept = keep(
        SERVES.replace(
            "while (said",
            "def beat():\n    while True: say('notify', text='WATCHDOG=1'); time.sleep(0.05)\nthreading.Thread(target=beat, daemon=True).start()\nwhile (said",
        )
    )
    kept.said()
    name = address.places()[0] / address.name_of(DEVICE)
    name.unlink()
    kept.until(name.exists, "nobody listens")
    assert kept.asked("look")["pid"] == kept.started[0][0]


@pytest.mark.parametrize("spec", [b"", b"{}", b"[]", b"7", b'{"command": 7, "environment": {}}'])
def test_a_spec_that_is_garbage_is_refused_and_costs_nothing(keep, spec):
    kept = keep(SERVES)
    kept.said()
    before = len(os.listdir(f"/proc/{kept.process.pid}/fd"))
    for _ in range(3):
        number = os.memfd_create("garbage")
        os.write(number, spec)
        assert "no daemon can be started" in kept.asked("replace", (number,), handovers=0)["error"]
        os.close(number)
    look = kept.asked("look")
    assert (look["keeper"], look["pid"]) == (kept.process.pid, kept.started[0][0])
    kept.until(lambda: len(os.listdir(f"/proc/{kept.process.pid}/fd")) <= before, "it keeps descriptors")


def children_of(pid: int) -> list[bytes]:
    """Their command lines; of those that end meanwhile nothing."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):
            found.append(Path(f"/proc/{child}/cmdline").read_bytes())
    return found


@pytest.mark.parametrize("late_s", [0.0, 0.002, 0.01, 0.03])
def test_a_signal_beside_the_exec_of_its_next_version_is_not_lost(keep, late_s):
    ends = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: (say('ended', how='signalled', line='', code=0), os._exit(0)))\n"
    kept = keep(SERVES.replace("while (said", ends + "while (said"))
    kept.said()
    spec = document({**kept.spec, "spare": True})
    assert "pid" in kept.asked("replace", (spec,), handovers=0)
    os.close(spec)

    def is_tried() -> bool:
        return any(b"--check" in line for line in children_of(kept.process.pid))

    kept.until(is_tried, "the next version is not tried")
    kept.until(lambda: not is_tried(), "it is tried for ever")
    time.sleep(late_s)  # not to wait for something: the moment is what is drawn
    kept.process.send_signal(signal.SIGTERM)
    assert kept.process.wait(60) == 0


def test_a_better_command_does_not_get_the_spare_daemon_of_the_one_before(keep, tmp_path):
    kept = keep(SERVES.replace('    say("ready")', '    time.sleep(600) if nth == 3 else say("ready")'))
    kept.said()
    spare = document({**kept.spec, "spare": True})
    assert "pid" in kept.asked("replace", (spare,), handovers=0)  # the second; the third is the spare one
    os.close(spare)
    kept.until(lambda: len(kept.started) == 3, "no spare one")
    os.kill(kept.started[1][0], signal.SIGKILL)
    kept.until(lambda: kept.asked("look")["recovery"] is not None, "nobody follows")
    (tmp_path / "better.py").write_text(DAEMON + SERVES)
    spec = document({**kept.spec, "command": [sys.executable, "-I", "-S", str(tmp_path / "better.py")]})
    said = kept.asked("replace", (spec,), handovers=1)
    os.close(spec)
    assert b"better.py" in Path(f"/proc/{said['pid']}/cmdline").read_bytes()


def test_a_disk_that_is_full_does_not_end_it(tmp_path):
    with Path("/dev/full").open("w") as full:
        spec = document(
            {"command": ["/nowhere/python"], "environment": {}, "limits": {"unreachable": 6}, "json": False}
        )
        roll = document({"directory": str(tmp_path), "spec": spec})
        command = [*keeper_command(), str(roll), str(tmp_path)]
        done = subprocess.run(command, pass_fds=(spec, roll), stdout=full, stderr=full, check=False, timeout=60)
    assert done.returncode == 1


def test_it_is_the_last_to_be_killed_for_want_of_memory_and_small(keep):
    kept = keep(SERVES)
    kept.said()
    process = Path(f"/proc/{kept.process.pid}")
    score = int((process / "oom_score_adj").read_text())
    lower = ["sh", "-c", "echo -100 > /proc/self/oom_score_adj"]
    assert (score < 0) == (subprocess.run(lower, check=False, capture_output=True).returncode == 0)
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    assert int(status["Threads"]) == 1


def test_the_log_is_kept_short(keep):
    many = SERVES.replace(
        "while (said",
        "for n in range(900):\n    os.write(2, b'a line of text\\n')\n    n % 50 or say('notify', text='WATCHDOG=1')\nwhile (said",
    )
    kept = keep(many, log_bytes=2000)
    assert "pid" in kept.said()
    older = kept.log.with_name("log.1")
    kept.until(older.exists, "it grows")
    assert "keeper" not in kept.log.read_text()


def test_a_daemon_looks_for_no_garbage_in_what_it_has_imported(tmp_path):
    """That took 80 of 480 ms until it served, and later a pause of the loop at each full collection."""
    ours, theirs = pair()
    ours.close()
    program = "import gc, sys; from stepfs.mount.daemon.__main__ import main\n"
    program += "print(main(sys.argv[1:]), gc.isenabled(), gc.get_freeze_count() > 10_000)"
    with theirs:
        command = [sys.executable, "-c", program, str(theirs.fileno()), str(tmp_path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, pass_fds=[theirs.fileno()])
    assert done.stdout.split() == ["0", "True", "True"]
