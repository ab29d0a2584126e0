"""What a mount stands on: the mount table, its directory, its cache and log, also where others may write or nobody may."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from stepfs._internal import limits
from stepfs.cli.commands.mount import warn_of_memory
from stepfs.data.disk_cache import DiskCache
from stepfs.doctor import machine
from stepfs.doctor.bundle import write_bundle
from stepfs.doctor.machine import Level
from stepfs.errors import AbsentError, RefusedError, StepfsError
from stepfs.mount import launch, logs, unmount
from stepfs.mount.host import cache_directory, mount_points, mount_table
from stepfs.mount.host.kernel import tune
from stepfs.mount.keeper.messages import pair
from stepfs.mount.logs import log_file
from stepfs.mount.options import MountOptions

LAKE, OTHER = "a" * 32, "b" * 32
TABLE = (
    "22 1 0:20 / /proc rw - proc proc rw\n"
    "90 22 0:53 / /mnt/a\\040b ro,nosuid shared:1 - fuse.stepfs s3://b/p ro,user_id=0\n"
    "91 22 0:54 / /mnt/a\\040b ro shared:2 master:3 - fuse.stepfs file:///x\\134y ro\n"
)


def test_the_mount_table_with_escapes_stacks_and_optional_fields(tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    monkeypatch.setattr(mount_table, "_MOUNTINFO", table)
    top = mount_table.mount_at(Path("/mnt/a b"))
    assert top is not None
    assert (top.device, top.fstype, top.source) == ("0:54", "fuse.stepfs", "file:///x\\y")
    assert mount_table.mount_at(Path("/mnt")) is None


@pytest.mark.parametrize("end", ["\r", "\x0b", "\x0c", "\u0085", "\u2028"])
def test_strange_names_of_other_mounts_concern_nobody(tmp_path, monkeypatch, end):
    """The kernel escapes newlines, not what else Python takes for the end of a line."""
    table = tmp_path / "mountinfo"
    table.write_bytes(f"{TABLE}92 22 0:55 / /mnt/data{end} rw - fuse.sshfs host: rw\nbroken\n".encode())
    monkeypatch.setattr(mount_table, "_MOUNTINFO", table)
    assert len(mount_table.mounts()) == 4
    assert mount_table.mount_at(Path(f"/mnt/data{end}")).device == "0:55"


def test_a_relative_link_behind_a_link_leads_where_the_kernel_says(tmp_path):
    (tmp_path / "nvme/job1").mkdir(parents=True)
    (tmp_path / "nvme/lakes/run").mkdir(parents=True)
    (tmp_path / "mnt").mkdir()
    (tmp_path / "mnt/data").symlink_to("../nvme/job1")
    (tmp_path / "nvme/job1/lake").symlink_to("../lakes/run/")
    (tmp_path / "nvme/job1/up").symlink_to("../lakes/..")
    assert mount_table.real_directory(tmp_path / "mnt/data/lake") == (tmp_path / "nvme/lakes/run").resolve()
    assert mount_table.real_directory(tmp_path / "mnt/data/up") == (tmp_path / "nvme").resolve()


def test_a_mount_point_is_claimed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(mount_points, "_CLAIM_S", 0.2)
    first = mount_points.claim(tmp_path)
    with pytest.raises(RefusedError, match="another mount is starting here"):
        mount_points.claim(tmp_path)
    os.close(first)
    os.close(mount_points.claim(tmp_path))


def test_another_users_cache_is_passed_over(tmp_path, monkeypatch):
    left = cache_directory.claim(tmp_path, OTHER)

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cache_directory, "_sweep_lake", denied)
    with cache_directory.claim(tmp_path, LAKE) as mine:
        assert mine.path.exists()
    left.remove()


def test_real_directories_do_not_touch_what_is_mounted(tmp_path, monkeypatch):
    (tmp_path / "real" / "m").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "to-m").symlink_to("link/m")
    expected = (tmp_path / "real" / "m").resolve()
    assert mount_table.real_directory(tmp_path / "link" / "m") == expected
    assert mount_table.real_directory(tmp_path / "to-m") == expected
    monkeypatch.chdir(tmp_path)
    assert mount_table.real_directory(Path("link/m/../m")) == expected
    assert mount_table.real_directory(Path("/")) == Path("/")


def test_bad_mount_points_say_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(AbsentError, match="does not exist; create it with `mkdir -p"):
        mount_points.prepare(tmp_path / "none")
    with pytest.raises(RefusedError, match="is not a directory"):
        mount_points.prepare(tmp_path / "file")
    with pytest.raises(RefusedError, match="is not empty"):
        mount_points.prepare(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    mount_points.prepare(tmp_path / "empty")


def test_a_listing_that_fails_or_hangs_is_told_apart(tmp_path):
    assert mount_points.list_within(tmp_path) == []
    error = mount_points.list_within(tmp_path / "none")
    assert isinstance(error, OSError)
    assert error.errno == errno.ENOENT


def test_a_cache_directory_is_private_and_removed_with_its_parents(tmp_path):
    base = tmp_path / "cache" / "stepfs"
    with cache_directory.claim(base, LAKE) as mine, cache_directory.claim(base, LAKE) as second:
        assert mine.path != second.path
        assert not mine.adopted
        assert mine.path.parent.name == LAKE
        assert mine.path.stat().st_mode & 0o777 == 0o700
        (mine.path / "slice").write_bytes(b"x")
    assert not base.exists()
    assert (tmp_path / "cache").exists()


def test_what_a_crash_left_is_adopted_by_the_next_mount_of_the_same_lake(tmp_path):
    crashed = cache_directory.claim(tmp_path, LAKE)
    (crashed.path / "slice").write_bytes(b"kept")
    os.close(crashed.lock)  # as the kernel does when a process is killed
    with cache_directory.claim(tmp_path, OTHER) as other:
        assert not other.adopted
    with cache_directory.claim(tmp_path, LAKE) as again:
        assert again.adopted
        assert (again.path / "slice").read_bytes() == b"kept"
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_came_back_for_is_swept_after_a_day(tmp_path):
    left = cache_directory.claim(tmp_path, OTHER)
    live = cache_directory.claim(tmp_path, "c" * 32)
    os.close(left.lock)
    (tmp_path / "not-ours").mkdir()
    old = time.time() - 2 * 86400
    for directory in (left.path, live.path):
        os.utime(directory, (old, old))
    with cache_directory.claim(tmp_path, LAKE):
        assert not left.path.exists()
        assert live.path.exists()  # somebody holds it
    live.remove()
    assert [p.name for p in tmp_path.iterdir()] == ["not-ours"]


def test_a_dead_cache_of_another_lake_at_the_same_mount_point_goes_at_once(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    caches = tmp_path / "caches"
    caches.mkdir()
    left = cache_directory.claim(caches, OTHER, here)
    elsewhere = cache_directory.claim(caches, "c" * 32, there)
    live = cache_directory.claim(caches, "d" * 32, here)  # impossible, and yet left alone
    for crashed in (left, elsewhere):
        crashed.release()
    with cache_directory.claim(caches, LAKE, here):
        assert not left.path.exists()
        assert elsewhere.path.exists()
        assert live.path.exists()
    moved = cache_directory.claim(caches, "c" * 32, here)
    assert moved.path == elsewhere.path
    moved.release()
    with cache_directory.claim(caches, LAKE, there):
        assert elsewhere.path.exists(), "its newest mount stood elsewhere"
    live.remove()


def test_a_cache_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match="choose one of a local disk with --cache-dir"):
        cache_directory.claim(tmp_path / "file", LAKE)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_file_system_that_keeps_no_modes_or_owners_is_refused_at_once(tmp_path, monkeypatch, earlier):
    """CIFS, vfat, NFS with root_squash: every new directory there looks like another user's."""
    made, mkdir = [], os.mkdir

    def makes_for_all(path, mode=0o777, *, dir_fd=None):
        mkdir(path, mode, dir_fd=dir_fd)
        os.chmod(path, 0o755, dir_fd=dir_fd)
        made.append(path)

    if earlier:
        (tmp_path / LAKE).mkdir(mode=0o755)
    monkeypatch.setattr(os, "mkdir", makes_for_all)
    with pytest.raises(RefusedError, match=rf"keeps no owners or modes .*owner {os.geteuid()}, mode 0755.*local disk"):
        cache_directory.claim(tmp_path, LAKE)
    assert len(made) == 1
    assert os.listdir(tmp_path) == [LAKE] * earlier


@pytest.mark.logs("does not answer: it is left there")
def test_a_disk_that_hangs_holds_neither_the_start_nor_the_end_of_a_mount(tmp_path, monkeypatch):
    place = cache_directory.claim(tmp_path, LAKE)
    monkeypatch.setattr(cache_directory, "answer_within", lambda _look: None)
    with pytest.raises(RefusedError, match=r"does not answer; choose one of a local disk with --cache-dir"):
        cache_directory.claim(tmp_path, OTHER)
    place.remove()
    assert place.path.is_dir()
    place.release()


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuses)
    with pytest.raises(RefusedError, match=r"no file in it can be locked; .*local disk"):
        cache_directory.claim(tmp_path, LAKE)
    assert os.listdir(tmp_path / LAKE) == []


def test_kernel_settings_are_written_where_they_can_be_and_read_back(tmp_path):
    bdi = tmp_path / "class/bdi/0:53"
    connection = tmp_path / "fs/fuse/connections/53"
    bdi.mkdir(parents=True)
    connection.mkdir(parents=True)
    for path in (bdi / "read_ahead_kb", connection / "max_background", connection / "congestion_threshold"):
        path.write_text("128\n")
    assert tune("0:53", sysfs=tmp_path) == {"read_ahead_kb": 4096, "max_background": 64, "congestion_threshold": 48}


def test_without_fusectl_the_defaults_stay_quietly(tmp_path):
    bdi = tmp_path / "class/bdi/0:53"
    bdi.mkdir(parents=True)
    (bdi / "read_ahead_kb").write_text("128\n")
    assert tune("0:53", sysfs=tmp_path)["max_background"] is None


def test_a_mount_that_appears_between_the_two_looks_is_named(tmp_path, monkeypatch):
    """Mounts that start together: the loser used to call the winner's files a directory that is not empty."""
    (tmp_path / "step-000000000000").mkdir()
    looks = iter([None, mount_table.Mounted("0:53", str(tmp_path), mount_table.FSTYPE, "s3://b/p")])
    monkeypatch.setattr(mount_points, "mount_at", lambda _: next(looks))
    with pytest.raises(RefusedError, match="s3://b/p is mounted here already"):
        mount_points.prepare(tmp_path)


ALL, CONTAINER = "000001ffffffffff", "00000000a80425fb"  # what Docker leaves to root


@pytest.mark.parametrize(
    ("is_root", "effective", "bounding", "level"),
    [
        (True, ALL, ALL, Level.OK),
        (True, CONTAINER, CONTAINER, Level.FAIL),
        (True, CONTAINER, ALL, Level.FAIL),
        (False, "0" * 16, ALL, Level.NOTE),  # no user_allow_other here
        (False, "0" * 16, CONTAINER, Level.FAIL),
    ],
)
def test_who_may_mount_is_what_the_kernel_says(tmp_path, is_root, effective, bounding, level):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t{bounding}\nSeccomp:\t0\n")
    found = machine.check_rights(is_root=is_root, root=tmp_path)
    assert found.level is level
    assert ("may not mount" in found.detail) == (level is Level.FAIL)
    assert ("--cap-add SYS_ADMIN" in found.remedy) == (level is Level.FAIL)


def test_a_kernel_that_does_not_say_is_believed_to_allow_it(tmp_path):
    assert machine.check_rights(is_root=True, root=tmp_path).level is Level.OK


def test_the_log_of_a_mount_that_failed_to_start_is_in_the_bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    log = log_file(tmp_path / "never mounted")
    log.write_text("Fatal Python error: Aborted\n")
    (tmp_path / "secret").write_text("not for the bundle")
    (tmp_path / "logs/planted.log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "logs/pipe.log")
    write_bundle(tmp_path / "bundle.tar.gz", "report\n")
    with tarfile.open(fileobj=io.BytesIO((tmp_path / "bundle.tar.gz").read_bytes())) as archive:
        names = [name for name in archive.getnames() if "/logs/" in name]
        assert [name.rpartition("/")[2] for name in names] == [log.name.replace(" ", "_")]
        member = archive.extractfile(names[0])
        assert member.read() == b"Fatal Python error: Aborted\n"


STRANGER = 12345
MIB = 1 << 20


@pytest.fixture
def scratch(tmp_path):
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.mkdir(mode=0o755)
    (path / "thesis.tex").write_text("years")
    os.chown(path, STRANGER, STRANGER)
    return path


def plant(scratch, lake_id, victim):
    """What a stranger prepares for the next root mount of a lake."""
    token = scratch / lake_id / ("0" * 16)
    token.mkdir(parents=True)
    (token / "lock").touch()
    (token / "slices").symlink_to(victim)
    for path in (token, token.parent):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o777)
    os.utime(token, (0, 0))
    return token


def untouched(victim):
    return (victim / "thesis.tex").read_text() == "years" and victim.stat().st_mode & 0o777 == 0o755


def test_a_planted_cache_is_passed_over_for_a_fresh_one_beside_it(scratch, victim):
    token = plant(scratch, LAKE, victim)
    with cache_directory.claim(scratch, LAKE) as mine:
        assert not mine.adopted
        assert mine.path.parent.name.startswith(f"{LAKE}-")
        assert mine.path.parent.stat().st_mode & 0o777 == 0o700
        DiskCache(mine.path, LAKE, limit=MIB).close()
    assert untouched(victim)
    assert (token / "slices").is_symlink()
    assert [path.name for path in scratch.iterdir()] == [LAKE]


def test_what_was_planted_for_other_lakes_is_not_swept(scratch, victim):
    token = plant(scratch, OTHER, victim)
    with cache_directory.claim(scratch, LAKE):
        pass
    assert untouched(victim)
    assert (token / "slices").is_symlink()


def test_a_fresh_directory_beside_a_strangers_is_adopted_after_a_crash(scratch, victim):
    plant(scratch, LAKE, victim)
    crashed = cache_directory.claim(scratch, LAKE)
    (crashed.path / "slice").write_bytes(b"kept")
    crashed.release()
    with cache_directory.claim(scratch, LAKE) as again:
        assert again.adopted
        assert (again.path / "slice").read_bytes() == b"kept"


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_no_directory_is_passed_over(scratch, victim, what):
    if what == "link":
        (scratch / LAKE).symlink_to(victim)
    else:
        (scratch / LAKE).touch()
    with cache_directory.claim(scratch, LAKE) as mine:
        assert mine.path.is_dir()
        assert mine.path.parent.name.startswith(f"{LAKE}-")
    assert untouched(victim)


def test_a_token_that_others_may_enter_is_not_adopted(scratch):
    crashed = cache_directory.claim(scratch, LAKE)
    crashed.path.chmod(0o770)
    crashed.release()
    with cache_directory.claim(scratch, LAKE) as mine:
        assert not mine.adopted


def test_a_link_in_place_of_the_lock_is_not_followed(scratch, victim):
    crashed = cache_directory.claim(scratch, LAKE)
    crashed.release()
    (crashed.path / "lock").unlink()
    (crashed.path / "lock").symlink_to(victim / "thesis.tex")
    with cache_directory.claim(scratch, LAKE) as mine:
        assert not mine.adopted
    assert untouched(victim)


def test_slices_behind_a_link_are_refused_not_cleared(tmp_path, victim):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine/slices").symlink_to(victim)
    with pytest.raises(RefusedError, match="choose another --cache-dir"):
        DiskCache(tmp_path / "mine", LAKE, limit=MIB)
    assert untouched(victim)


def test_a_directory_that_was_renamed_under_the_cache_still_gets_the_files(tmp_path, victim):
    """Who may write to the parent can exchange the directory; what is in the old one stays where the cache put it."""
    disk = DiskCache(tmp_path / "mine", LAKE, limit=MIB)
    (tmp_path / "mine/slices").rename(tmp_path / "moved")
    (tmp_path / "mine/slices").symlink_to(victim)
    (tmp_path / "moved" / "x").touch()
    disk.remove(["x", "thesis.tex"])
    assert not (tmp_path / "moved" / "x").exists()
    assert untouched(victim)
    disk.close()


@pytest.mark.parametrize("planted", ["link", "fifo", "stranger's file"])
def test_a_log_that_is_not_ours_is_not_written(tmp_path, victim, monkeypatch, planted):
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "logs"))
    options = MountOptions("file:///lake", tmp_path / "m")
    log = logs.log_file(options.directory)
    log.parent.mkdir()
    if planted == "link":
        log.symlink_to(victim / "thesis.tex")
    elif planted == "fifo":
        os.mkfifo(log)
    else:
        log.touch()
        os.chown(log, STRANGER, STRANGER)
    with pytest.raises(RefusedError, match="set STEPFS_LOG_DIR"):
        launch.start(options)
    assert untouched(victim)


def test_a_log_directory_that_cannot_be_made_names_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STEPFS_LOG_DIR", str(tmp_path / "file/logs"))
    with pytest.raises(RefusedError, match="set STEPFS_LOG_DIR"):
        launch.start(MountOptions("file:///lake", Path(tmp_path / "m")))


LAKE_URL = "0" * 32


@pytest.fixture
def nobody(monkeypatch):
    """No HOME, and a uid that is in no passwd."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(os, "geteuid", lambda: 1_000_660_000)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "STEPFS_LOG_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_cache_directory_nothing_is_made(monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    with cache_directory.claimed(None, LAKE_URL) as place:
        assert place is None


def test_with_one_it_is_claimed_and_removed(tmp_path):
    with cache_directory.claimed(tmp_path / "c", LAKE_URL) as place:
        assert place.path.is_dir()
    assert not (tmp_path / "c").exists()


def test_one_that_another_daemon_has_taken_over_stays_locked(tmp_path):
    with cache_directory.claimed(tmp_path / "c", LAKE_URL, is_ours=lambda: False) as first:
        lock = os.dup(first.lock)
        heir = cache_directory.CachePlace.inherited(first.path, lock, keep_base=first.keep_base)
    with cache_directory.claimed(tmp_path / "c", LAKE_URL) as other:
        assert other.path != first.path
    with cache_directory.claimed(None, LAKE_URL, inherited=heir) as second:
        assert second.path == first.path
        assert second.path.is_dir()
    assert not first.path.exists()


def test_a_user_without_a_home_has_a_log_and_a_cache(nobody, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert log_file(Path("/m")).is_relative_to(tmp_path / "stepfs-1000660000")
    assert cache_directory.default_cache_dir().is_relative_to(tmp_path / "stepfs-1000660000")


@pytest.mark.parametrize(
    ("options", "said"), [
        ({"memory_bytes": 3 << 30}, True), ({"memory_bytes": 2 << 30}, False),
        ({"cache_bytes": 3 << 30, "cache_dir": Path("/c")}, False), ({}, False),
    ],
)  # fmt: skip
def test_a_budget_beyond_the_limit_is_said(monkeypatch, capsys, options, said):
    monkeypatch.setattr(limits, "read_memory", lambda: limits.Memory(2 << 30, 1 << 30, 0.0))
    warn_of_memory(MountOptions("file:///lake", Path("/m"), **options))
    assert ("3.00 GiB is more than this machine or its cgroup has (2.00 GiB)" in capsys.readouterr().err) is said


def test_an_unmount_ends_though_the_cache_disk_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(unmount, "answer_within", lambda _look: None)
    with pytest.raises(StepfsError, match=rf"unmounted, but the cache disk does not answer: {tmp_path} is left"):
        unmount._wait(unmount.Daemon(1, None, tmp_path), Path("log"), [], time.monotonic() + 600)


def test_a_keeper_that_is_killed_while_it_is_asked_is_said_so(tmp_path):
    """Its mount logs to a terminal: there is no log to look into."""
    options = MountOptions("file:///lake", tmp_path / "m")
    ours, theirs = pair()
    theirs.close()
    found = {"spec": {"options": options.to_map()}, "handovers": 0, "keeper": 1, "sock": ours}
    with pytest.raises(RefusedError, match=r"its keeper ended before it answered.*then try again"):
        launch._replace(options, found, tmp_path / "none.log", (), print, lambda _: None)


def test_a_next_daemon_that_is_killed_leaves_the_mount_as_it_was(tmp_path, monkeypatch):
    """Which is a refusal (exit 4), to be tried again, and no failure of the mount."""
    monkeypatch.setattr(launch, "_lives", lambda *_: True)
    ours, theirs = pair()
    theirs.close()
    options = MountOptions("file:///lake", tmp_path / "m")
    found = {"spec": {"options": options.to_map()}, "handovers": 0, "keeper": 1, "sock": ours}
    with pytest.raises(
        RefusedError, match=r"the next daemon ended before it was ready.*says which daemon serves, then try again"
    ):
        launch._replace(options, found, tmp_path / "none.log", (), print, lambda _: None)


def test_a_daemon_that_says_nothing_is_told_of_without_its_log(tmp_path):
    with pytest.raises(launch.DaemonError, match=r"the mount daemon ended before it was ready$"):
        launch._understand({}, None, tmp_path / "none.log")
    log = tmp_path / "m.log"
    log.write_text("one\ntwo\n")
    with pytest.raises(launch.DaemonError, match=r"before it was ready; .*m.log says: one; two$"):
        launch._understand({}, None, log)
