"""A daemon that is replaced, or killed, under its readers: they notice nothing, and whatever fails leaves the mount as it was."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from finished import ran
from realmount import (
    PATIENCE_S,
    STEPFS,
    change_constants,
    clear,
    gone,
    lake_with,
    make_lake,
    mounted,
    needs_resend,
    open_files,
    payload,
    running,
    stepfs,
    until,
)
from steady import SIZE, SLICES, STEPS, daemons_of, steady_readers
from succession import keeper_follows, kill, replace, replaced, tampered

from stepfs.announce import announce_steps
from stepfs.mount.fuse.link import HAS_RESEND
from stepfs.mount.host.mount_table import mount_at
from stepfs.mount.keeper import address
from stepfs.mount.state import State
from stepfs_producer import Producer

pytestmark = pytest.mark.usefixtures("real_daemons")


@needs_resend
def test_the_daemon_that_follows_a_dead_one_knows_what_is_announced_and_primed(steady, tmp_path):
    options = ("--ranks", "0-1", "--group", "run")
    with mounted(steady, tmp_path / "m", *options) as mount:
        assert announce_steps(mount.directory, range(STEPS - 1, 2, -1))
        for step in (STEPS - 1, STEPS - 2):
            mount.file(step, 0).read_bytes()
        until(lambda: fronts_of(mount) == [2], "it notes no place")
        until(lambda: len(primed_of(mount)) > STEPS, lambda: f"{primed_of(mount)} of {mount.status()}")
        primed = primed_of(mount)
        kill(mount)
        assert fronts_of(mount) == [2]
        assert mount.status()["order_needs_from"] == 3
        others = {(step, rank) for step in range(STEPS) for rank in range(SLICES)} - primed
        assert mount.status()["data"]["bytes_fetched"] <= sum(len(payload(step, rank, SIZE)) for step, rank in others)


@contextmanager
def state_of(mount):
    """What a daemon has written for the next one."""
    path = next(descriptor for descriptor, name in open_files(mount.pid).items() if "stepfs-state" in name)
    with path.open("rb") as file:
        yield State(file.fileno())


def fronts_of(mount):
    with state_of(mount) as state:
        return [1 + max(place for place, *_ in near) for near in state.read_noted().get("near", {}).values() if near]


def primed_of(mount):
    with state_of(mount) as state:
        return {key for _, key, *_ in state.primed.read()}


def run_drill(steady, tmp_path, monkeypatch, act, times):
    change_constants(monkeypatch, {"stepfs.mount.launch:DEATHS": 1000})
    with mounted(steady, tmp_path / "m", "--ranks", "0-1") as mount, steady_readers(steady, mount):
        for _ in range(times):
            act(mount)
        until(lambda: daemons_of(mount) == [mount.pid], lambda: f"{daemons_of(mount)} are there, not {mount.pid} alone")
        status = mount.status()
        assert status["handovers"] + status["recoveries"] >= times
        assert status["faults"] == 0
    assert not running(mount.pid)


@pytest.mark.parametrize("act", [replace, pytest.param(kill, marks=needs_resend)])
def test_readers_of_all_kinds_notice_nothing(steady, tmp_path, monkeypatch, act):
    run_drill(steady, tmp_path, monkeypatch, act, 2)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("act", [replace, pytest.param(kill, marks=needs_resend)])
def test_fifty_times_in_a_row(steady, tmp_path, monkeypatch, act):
    run_drill(steady, tmp_path, monkeypatch, act, 50)


@needs_resend
def test_pages_that_are_cached_are_read_from_no_daemon(steady, tmp_path):
    options = ("--no-prime", "--prefetch", "0", "--group", "run")
    with mounted(steady, tmp_path / "m", *options) as mount, mount.file(2, 0).open("rb") as held:
        mapped = mmap.mmap(held.fileno(), 0, prot=mmap.PROT_READ)
        content = mount.file(1, 1).read_bytes() + held.read()
        for act in (lambda: replace(mount, *options), lambda: kill(mount)):
            act()
            first, before = (mount.requests().get("read", 0) for _ in range(2))
            held.seek(0)
            assert mount.file(1, 1).read_bytes() + held.read() == content
            assert content.endswith(mapped[:])
            assert mount.requests()["read"] - before == before - first  # what asking costs
            assert mount.status()["data"]["bytes_fetched"] == 0


SLOW_READS = """
import sys
if "stepfs.mount.daemon" in sys.orig_argv and once():
    import trio
    from stepfs.mount.fuse.files import OpenSlice
    read = OpenSlice.read
    async def slowly(self, offset, size):
        with self.handle._slices.shelter.wait():
            await trio.sleep(4)
        return await read(self, offset, size)
    OpenSlice.read = slowly
"""


@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.nightly), pytest.param(True, marks=needs_resend)]
)
def test_a_read_that_is_under_way_is_answered_by_the_daemon_that_has_it_or_after_its_death(
    steady, tmp_path, monkeypatch, killed
):
    with tampered(monkeypatch, tmp_path, SLOW_READS), mounted(steady, tmp_path / "m", "--no-prime") as mount:
        reader = subprocess.Popen(["cat", mount.file(7, 0)], stdout=subprocess.PIPE)
        until(lambda: mount.requests().get("open", 0) > 0 and mount.status()["open_files"] == 1, "nobody reads")
        before = replace(mount, "--no-prime")
        assert mount.file(8, 1).read_bytes() == payload(8, 1, SIZE)  # nobody waits for that one
        assert running(before)
        if killed:
            os.kill(before, signal.SIGKILL)
        assert reader.communicate(timeout=PATIENCE_S)[0] == payload(7, 0, SIZE)
        gone(before)
        assert mount.status()["open_files"] == 0


ATTACH = "import signal\nfrom stepfs.mount.fuse.link import Link\n"
DIES = {
    "before it asks": ATTACH + "Link.introduce = lambda self: os.kill(os.getpid(), 9)",
    "before it reads": ATTACH + "Link.attach = lambda self: os.kill(os.getpid(), 9)",
    "after it has read": "from stepfs.mount.fuse.operations import StepOperations\n"
    'for name in ("lookup", "getattr", "opendir"): setattr(StepOperations, name, lambda *_: os.kill(os.getpid(), 9))',
}


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("before it asks", marks=pytest.mark.nightly),
        "before it reads",
        pytest.param("after it has read", marks=[needs_resend, pytest.mark.nightly]),
    ],
)
def test_a_daemon_that_dies_before_it_serves_leaves_the_mount_to_the_one_before(steady, tmp_path, monkeypatch, when):
    with mounted(steady, tmp_path / "m", allowed=["ended before it served"]) as mount, steady_readers(steady, mount):
        for _ in range(2):
            with tampered(monkeypatch, tmp_path, DIES[when]):
                assert replaced(mount).returncode == 4
            assert mount.config()["pid"] == mount.pid
        replace(mount)
    assert not running(mount.pid)


@pytest.mark.nightly
@needs_resend
def test_requests_that_two_followers_took_with_them_are_answered_by_the_third(steady, tmp_path, monkeypatch):
    code = (
        "from stepfs.mount.fuse.operations import StepOperations\nread, open_ = StepOperations.read, StepOperations.open\n"
        "async def dies(self, *a):\n    if self.files.generation and once(2): os.kill(os.getpid(), 9)\n    return await read(self, *a)\n"
        "StepOperations.read = dies\n"
    )
    with tampered(monkeypatch, tmp_path, code), mounted(steady, tmp_path / "m", "--no-prime") as mount:
        with mount.file(3, 1).open("rb", buffering=0) as held:
            mount.kill(signal.SIGKILL)
            assert held.read(100) == payload(3, 1, SIZE)[:100]
        assert mount.status()["recoveries"] in {1, 2, 3}  # some have served before they read it
        mount.pid = mount.config()["pid"]


@pytest.mark.nightly
@needs_resend
def test_a_daemon_that_follows_and_finds_the_mount_gone_just_ends(steady, tmp_path, monkeypatch):
    code = (
        "import sys, trio\nfrom stepfs.mount.host.mount_points import unmount\nfrom stepfs.mount.daemon.session import _Session\n"
        "look = _Session._look\nasync def late(self, link):\n"
        "    if self._before is not None: unmount(self._directory, lazy=True)\n    await look(self, link)\n"
        "_Session._look = late\n"
    )
    with tampered(monkeypatch, tmp_path, code), mounted(steady, tmp_path / "m", "--no-prime") as mount:
        mount.kill(signal.SIGKILL)
        gone(mount.keeper)
        assert mount_at(mount.directory) is None
        assert not daemons_of(mount)


@needs_resend
@pytest.mark.parametrize(
    "how",
    [
        "three in a minute",
        *(pytest.param(how, marks=pytest.mark.nightly) for how in ("none serves", "both", "--no-recover")),
    ],
)
def test_where_nobody_can_follow_readers_get_errors_and_the_next_mount_heals(steady, tmp_path, monkeypatch, how):
    options = ["--no-recover"] if how == "--no-recover" else []
    change_constants(monkeypatch, {"stepfs.mount.launch:PATIENCE_S": 1.0} if how.startswith("none") else {})
    code = {"none serves": "import sys\nif 'stepfs.mount.daemon' in sys.orig_argv and not once(): os._exit(1)"}
    with (
        tampered(monkeypatch, tmp_path, code.get(how, "")),
        mounted(steady, tmp_path / "m", *options, allowed=["so that readers fail"]) as mount,
    ):
        if how == "three in a minute":
            for _ in range(2):
                kill(mount)
        if how == "both":
            mount.kill(signal.SIGSTOP)
            os.kill(mount.keeper, signal.SIGKILL)
        mount.kill(signal.SIGKILL)
        gone(mount.pid)
        gone(mount.keeper)
        with pytest.raises(OSError, match=r"not connected|abort"):
            os.listdir(mount.directory)
    with mounted(steady, tmp_path / "m", allowed=["so that readers fail"]) as again:
        assert again.config()["follows"] is None
        assert again.file(1, 0).read_bytes() == payload(1, 0, SIZE)


def test_a_keeper_that_is_killed_costs_no_reader_anything(steady, tmp_path):
    options = ("--ranks", "0-1", "--cache-dir", str(tmp_path / "c"))
    allowed = ["another one is started"]
    with mounted(steady, tmp_path / "m", *options, allowed=allowed) as mount, steady_readers(steady, mount):
        for _ in range(2):
            keeper_follows(mount)
            primed = mount.status()["data"]["primed_files"]
            assert primed >= 0
            replace(mount)
            keeper_follows(mount)
            if not needs_resend.args[0]:
                kill(mount)
    assert not running(mount.keeper)
    assert not (tmp_path / "c").exists()


DIES_IN_A_HAND_OVER = {
    "before it tells the next one": """
import sys
if "stepfs.mount.daemon" in sys.orig_argv and once():
    import signal
    from stepfs.mount.daemon.keeper_socket import Tie
    say = Tie.say
    def to_nobody(self, what, *others, **facts):
        if what == "stopped":
            os.kill(self.keeper, signal.SIGKILL)
        return say(self, what, *others, **facts)
    Tie.say = to_nobody
""",
    "after it has told the next one": """
import sys
if "stepfs.mount.daemon" in sys.orig_argv and not once():
    import signal
    from stepfs.mount.fuse.link import Link
    attach = Link.attach
    def alone(self):
        os.kill(os.getppid(), signal.SIGKILL)
        attach(self)
    Link.attach = alone
""",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "when", ["before it tells the next one", pytest.param("after it has told the next one", marks=pytest.mark.nightly)]
)
def test_a_keeper_that_dies_in_a_hand_over_leaves_one_daemon_that_serves(steady, tmp_path, monkeypatch, when):
    allowed = ["another one is started", "is served as before", "the keeper has ended before"]
    with (
        tampered(monkeypatch, tmp_path, DIES_IN_A_HAND_OVER[when]),
        mounted(steady, tmp_path / "m", "--no-prime", allowed=allowed) as mount,
        steady_readers(steady, mount),
    ):
        before = mount.pid
        replaced(mount)
        until(lambda: mount.config()["keeper"] != mount.keeper, "no other keeper")
        mount.pid, mount.keeper = (mount.config()[name] for name in ("pid", "keeper"))
        assert (mount.pid == before) == when.startswith("before")
        until(lambda: daemons_of(mount) == [mount.pid], "others are there, too")


@needs_resend
def test_who_waits_for_a_commit_waits_at_the_next_daemon_at_once(steady, tmp_path, monkeypatch):
    """The one before may see commits that the next one has not seen yet: a step would be shown, and then not."""
    change_constants(monkeypatch, {"stepfs.mount.daemon.replacement:DRAIN_S": 1000.0})
    with mounted(steady, tmp_path / "m", "--wait", "600") as mount:
        reader = subprocess.Popen(["cat", str(mount.file(STEPS, 0))], stdout=subprocess.PIPE)
        until(lambda: mount.status()["waiting"] == 1, "nobody waits")
        before = replace(mount, "--wait", "600")
        gone(before)
        until(lambda: mount.status()["waiting"] == 1, "the next one was not asked")
        with Producer(steady, producer_id="later") as producer:
            producer.append([payload(STEPS, index, SIZE) for index in range(SLICES)], position=None)
        assert reader.communicate(timeout=PATIENCE_S)[0] == payload(STEPS, 0, SIZE)


LATE = """
import sys
if "stepfs.mount.daemon" in sys.orig_argv:
    import trio
    from pathlib import Path
    from stepfs.mount.fuse.link import Link
    from stepfs.mount.daemon.parts import MountParts
    here, introduce, see, attach = Path({here!r}), Link.introduce, MountParts.see, Link.attach

    async def late(self):
        (here / "opened").touch()
        while not (here / "on").exists():
            await trio.sleep(0.01)
        await introduce(self)

    async def told(self, version, *within):
        with (here / "seen").open("a") as notes:
            print("behind" if version + {more} > self.log.state.version else "there", file=notes)
        return await see(self, version + {more}, *within)

    Link.introduce, MountParts.see = late, told
"""


@pytest.mark.parametrize("comes", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_daemon_sees_all_that_is_shown_before_the_one_that_serves_stops(steady, tmp_path, monkeypatch, comes):
    """Else every reader waits for a look at the store, and for one that does not answer."""
    with mounted(steady, tmp_path / "m", allowed=["the mount is as it was"]) as mount:
        change_constants(monkeypatch, {} if comes else {"stepfs.mount.daemon.parts:SEEN_S": 1.0})
        with tampered(monkeypatch, tmp_path, LATE.format(here=str(tmp_path), more=0 if comes else 1)):
            taking = threading.Thread(target=lambda: results.append(replaced(mount)))
            results = []
            taking.start()
            until((tmp_path / "opened").exists, "it does not open the lake")
            with Producer(steady, producer_id="later") as producer:
                producer.append([payload(STEPS, index, SIZE) for index in range(SLICES)], position=None)
            until(lambda: mount.status()["frontier"] == STEPS, "the one that serves sees no commit")
            (tmp_path / "on").touch()
            taking.join()
        seen = (tmp_path / "seen").read_text().split()
        assert seen[0] == "behind"
        if comes:
            assert results[0].returncode == 0, results[0].stderr
            mount.pid = mount.config()["pid"]
        else:
            assert results[0].returncode == 6
            assert "the mount is as it was" in results[0].stderr
            assert mount.config()["pid"] == mount.pid
        assert mount.file(STEPS, 1).read_bytes() == payload(STEPS, 1, SIZE)


HANGS = """
import sys
if "stepfs.mount.daemon" in sys.orig_argv and once():
    import threading, time
    def look():
        while not os.path.ismount({mount!r}):
            time.sleep(0.01)
        os.stat({mount!r} + "/step-000000999/rank-00000.bin")  # answered once it is committed
    threading.Thread(target=look, daemon=True).start()
"""


@needs_resend
def test_a_daemon_that_hangs_in_its_own_mount_is_followed(steady, tmp_path, monkeypatch):
    """Its process does not end, however it is killed, until somebody answers it."""
    code = HANGS.format(mount=str(tmp_path / "m"))
    with tampered(monkeypatch, tmp_path, code), mounted(steady, tmp_path / "m", "--wait", "600") as mount:
        until(lambda: mount.status()["waiting"] == 1, "it does not hang")
        before = mount.pid
        mount.kill(signal.SIGKILL)
        until(lambda: bool({*daemons_of(mount)} - {before}), "nobody follows")  # asked of the mount, it would hang
        mount.pid = mount.config()["pid"]
        gone(before)
        assert daemons_of(mount) == [mount.pid]
        assert mount.file(1, 0).read_bytes() == payload(1, 0, SIZE)


@pytest.mark.nightly
def test_without_resend_a_mount_is_handed_over_and_a_death_cuts_it(steady, tmp_path, monkeypatch):
    change_constants(monkeypatch, {"stepfs.mount.fuse.link:HAS_RESEND": 0})
    assert HAS_RESEND
    with mounted(steady, tmp_path / "m", "--ranks", "0-1") as mount:
        with steady_readers(steady, mount):
            for _ in range(2):
                replace(mount, "--ranks", "0-1")
        until(lambda: mount.status()["data"]["primed_files"] > 0, "the next one does not prime")
        mount.kill(signal.SIGKILL)
        gone(mount.pid)
        with pytest.raises(OSError, match=r"not connected|abort"):
            os.listdir(mount.directory)


@pytest.fixture
def other_lake(tmp_path):
    url = (tmp_path / "other").as_uri()
    make_lake(url)
    return url


REFUSED = {  # options: exit code, and what the line says
    ("--world", "4"): (4, "with no --world, not --world 4"),
    ("--mesh", "dp=2"): (4, "with no --mesh, not --mesh dp=2"),
    ("--steps", "0:3"): (4, "with no --steps, not --steps 0:3"),
    ("--allow-other",): (4, "with no --allow-other, not --allow-other: the kernel was told"),
    ("other lake",): (4, "its readers' names would mean other bytes"),
    ("another INIT",): (4, "agree on something else"),
    ("no store",): (6, ""),
    ("an older version",): (4, "listens nowhere"),
    ("a link",): (4, "0700"),
    ("open to others",): (4, "0700"),
    ("while it is unmounted",): (4, "about to be unmounted"),
}
OTHERWISE = {
    "another INIT": "from stepfs.mount.fuse.operations import StepOperations\nStepOperations.enable_writeback_cache = True\n",
    "no store": "from stepfs.mount.daemon import session\nfrom stepfs.errors import StoreUnreachableError\n"
    "async def away(_): raise StoreUnreachableError('no store')\nsession.open_lake = away\n",
    "while it is unmounted": "from stepfs.mount.fuse.link import Link\nintroduce = Link.introduce\n"
    "async def late(self):\n    await introduce(self)\n    os.stat(os.environ['TESTS_LEAVE'])\nLink.introduce = late\n",
}


AT_NIGHT = {
    ("--world", "4"),
    ("--mesh", "dp=2"),
    ("no store",),
    ("an older version",),
    ("a link",),
    ("open to others",),
}


@pytest.mark.parametrize(
    "asked", [pytest.param(one, marks=pytest.mark.nightly) if one in AT_NIGHT else one for one in REFUSED], ids=" ".join
)
def test_what_cannot_take_over_says_why_and_the_mount_is_as_it_was(steady, other_lake, tmp_path, monkeypatch, asked):
    code, line = REFUSED[asked]
    ran(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)  # in these tests' own namespace
    place = Path("/run/stepfs")
    with mounted(steady, tmp_path / "m", allowed=[line or "no store"]) as mount:
        lake, options = (other_lake if asked == ("other lake",) else None), asked if asked[0].startswith("--") else ()
        if asked == ("an older version",):
            for path in place.iterdir():
                path.unlink()
        elif asked == ("a link",):
            place.rename("/run/elsewhere")
            place.symlink_to("/run/elsewhere")
        elif asked == ("open to others",):
            place.chmod(0o755)
        monkeypatch.setenv("TESTS_LEAVE", str(mount.directory / ".stepfs/leave"))
        with tampered(monkeypatch, tmp_path, OTHERWISE.get(asked[0], "")):
            done = replaced(mount, *options, lake=lake)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert line in done.stderr
        assert mount.config()["pid"] == mount.pid
        assert mount.file(1, 0).read_bytes() == payload(1, 0, SIZE)
    ran(["umount", "/run"], check=True)


@pytest.mark.nightly
def test_of_two_that_take_over_at_once_one_wins_and_where_nothing_is_mounted_it_mounts(steady, tmp_path):
    (tmp_path / "m").mkdir()
    env = {**os.environ, "STEPFS_LOG_DIR": str(tmp_path / "logs")}
    ran([*STEPFS, "mount", steady, str(tmp_path / "m"), "--replace"], env=env, check=True)
    try:
        with steady_mount(tmp_path) as mount:
            together = [
                subprocess.Popen(
                    [*STEPFS, "mount", steady, mount.directory, "--replace"], env=env, stderr=subprocess.PIPE
                )
                for _ in range(3)
            ]
            codes = [process.wait(PATIENCE_S) for process in together]
            said = [process.communicate()[1].decode() for process in together]
            assert 0 in codes, said
            assert set(codes) <= {0, 4}, said
            assert mount.file(1, 0).read_bytes() == payload(1, 0, SIZE)
            until(lambda: len(daemons_of(mount)) == 1, "several serve")
            assert mount.status()["handovers"] == codes.count(0)
    finally:
        stepfs("unmount", tmp_path / "m").check_returncode()


@contextmanager
def steady_mount(tmp_path):
    """What somebody else has mounted."""
    from realmount import Mount  # noqa: PLC0415

    yield Mount(tmp_path / "m", next((tmp_path / "logs").iterdir()), 0, Path("/nonexistent"))


def test_everything_but_the_view_may_change_and_the_cache_is_kept(steady, tmp_path):
    cached = ("--cache-dir", str(tmp_path / "c"), "--cache-size", "64M")
    options = ("--group", "run", "--ranks", "0-1", "--metrics-port")
    from servers import free_ports  # noqa: PLC0415

    first, second = free_ports(2)
    with mounted(steady, tmp_path / "m", *cached, *options, str(first)) as mount:
        until(lambda: mount.status()["data"]["disk_written"] > 0, "nothing is cached")
        written = sorted((mount.cache_dir / "slices").glob("*.slice"))
        replace(mount, *cached, *options, str(second), "--memory", "128M", "--poll", "1s")
        config = mount.config()
        assert config["options"]["metrics-port"] == str(second)
        assert config["memory_bytes"] == 128 << 20
        assert Path(config["cache_dir"]) == mount.cache_dir
        assert set(written) <= set((mount.cache_dir / "slices").iterdir())
        until(
            lambda: "stepfs_handovers_total{" in scraped(second) or "stepfs_handovers_total 1.0" in scraped(second),
            "no metrics",
        )
        if not needs_resend.args[0]:
            kill(mount)
            assert Path(mount.config()["cache_dir"]) == mount.cache_dir
            assert "stepfs_recoveries_total 1.0" in (mount.directory / ".stepfs/metrics").read_text()
    assert not mount.cache_dir.exists()
    assert not (tmp_path / "c").exists()


def scraped(port):
    import urllib.request  # noqa: PLC0415

    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:
        return ""


@pytest.mark.parametrize(
    "act", [pytest.param(replace, marks=pytest.mark.nightly), pytest.param(kill, marks=needs_resend)]
)
def test_files_of_steps_to_come_get_their_true_size_from_the_next_daemon(file_url, tmp_path, act):
    lake_with(file_url, 1)
    options = ("--steps", "0:3", "--no-prime")
    with mounted(file_url, tmp_path / "m", *options) as mount:
        assert [mount.file(step, 0).stat().st_size > 0 for step in range(3)] == [True, False, False]
        act(mount, *options) if act is replace else act(mount)
        with Producer(file_url, producer_id="p0") as producer:
            producer.append([payload(1, rank) for rank in range(2)], position=1)
        mount.wait_for(1)
        with mount.file(1, 0).open("rb") as file:
            assert os.fstat(file.fileno()).st_size == len(payload(1, 0))
            assert file.read() == payload(1, 0)


@pytest.mark.nightly
def test_a_user_without_rights_replaces_and_recovers_and_root_may_not(lake, tmp_path, request):
    home, user = Path(tempfile.mkdtemp()), 54321  # below a directory that all users may enter
    request.addfinalizer(lambda: shutil.rmtree(home))
    directory = home / "m"
    directory.mkdir()
    for own in (home, directory):
        os.chown(own, user, user)
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # to reach this interpreter
    as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *rights, *STEPFS]
    env = {**os.environ, "STEPFS_LOG_DIR": str(home / "logs"), "HOME": str(home)}
    env.pop("XDG_RUNTIME_DIR", None)
    device = tmp_path / "fuse"  # of all users, as on most machines
    os.mknod(device, stat.S_IFCHR | 0o666, os.stat("/dev/fuse").st_rdev)
    device.chmod(0o666)
    ran(["mount", "--bind", str(device), "/dev/fuse"], check=True)  # in these tests' own namespace
    (home / "passwd").write_text(Path("/etc/passwd").read_text() + f"somebody:x:{user}:{user}::/:/bin/sh\n")
    ran(["mount", "--bind", str(home / "passwd"), "/etc/passwd"], check=True)
    held = None
    look = "import json, sys; print(json.load(open(sys.argv[1]))['pid'])"

    def pid():
        done = ran([*as_user[:-2], "-c", look, str(directory / ".stepfs/config.json")], env=env)
        return int(done.stdout)

    try:
        done = ran([*as_user, "mount", lake, str(directory)], env=env)
        assert done.returncode == 0, done.stderr
        hold = "import sys; file = open(sys.argv[1], 'rb'); print(flush=True); input(); sys.stdout.buffer.write(file.read())"
        held = subprocess.Popen(
            [*as_user[:-2], "-c", hold, directory / "step-000000000/rank-00000.bin"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert held.stdout.readline() == b"\n"
        first = pid()
        done = ran([*as_user, "mount", lake, str(directory), "--replace"], env=env)
        assert (done.returncode, done.stderr) == (0, "")
        second = pid()
        assert second != first
        if not needs_resend.args[0]:
            os.kill(second, signal.SIGKILL)
            assert pid() not in {first, second}
        done = ran([*STEPFS, "mount", lake, str(directory), "--replace"], env=env | {"STEPFS_LOG_DIR": str(tmp_path)})
        assert (done.returncode, done.stderr.count("\n")) == (4, 1)
        assert f"user {user} mounted it" in done.stderr
        assert held.communicate(b"\n", timeout=PATIENCE_S)[0] == payload(0, 0)
        assert stepfs("unmount", directory).returncode == 0
    finally:
        if held is not None:
            held.kill()
            held.communicate()
        clear(directory, None)
        ran(["umount", "/dev/fuse", "/etc/passwd"])
    assert mount_at(directory) is None


def names_in(directory):
    return sorted(path.name.partition("-")[2] for path in directory.iterdir())


def test_only_the_users_own_directory_takes_a_socket_and_those_of_killed_keepers_go(tmp_path, monkeypatch):
    own = tmp_path / "own"
    monkeypatch.setattr(address, "_ROOTS", own)
    first = address.listen("0:99")
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(own / "x-0-7.sock"))
    second = address.listen("0:98")
    assert names_in(own) == ["0-98.sock", "0-99.sock"]
    address.leave("0:98", second)
    other = address.listen("0:99")  # of the next mount with this number
    address.leave("0:99", first)
    assert names_in(own) == ["0-99.sock"]
    address.leave("0:99", other)
    assert names_in(own) == []
    own.chmod(0o777)
    with pytest.raises(PermissionError):
        address.listen("0:99")


def test_a_socket_that_comes_in_the_moment_in_which_a_dead_one_is_removed_stays(tmp_path, monkeypatch):
    own = tmp_path / "own"
    monkeypatch.setattr(address, "_ROOTS", own)
    own.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(own / address.name_of("0:7")))
    is_dead, came = address._is_dead, []

    def slowly(name):
        found = is_dead(name)
        if found and name.name == address.name_of("0:7") and not came:
            came.append(None)
            came[0] = address.listen("0:7")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(address, "_is_dead", slowly)
        second = address.listen("0:98")
    with came[0], second:
        assert names_in(own) == ["0-7.sock", "0-98.sock"]
        assert not is_dead(own / address.name_of("0:7"))


def test_of_two_keepers_that_come_and_go_at_once_the_one_that_came_can_be_reached(tmp_path, monkeypatch):
    own = tmp_path / "own"
    monkeypatch.setattr(address, "_ROOTS", own)
    goes = address.listen("0:1")
    for _ in range(300):
        both = threading.Barrier(2)
        leaving = threading.Thread(target=lambda goes=goes, both=both: (both.wait(), address.leave("0:1", goes)))
        leaving.start()
        both.wait()
        comes = address.listen("0:1")
        leaving.join()
        assert names_in(own) == ["0-1.sock"]
        goes = comes
    goes.close()
