"""The doctor shown machines that we do not have."""

from __future__ import annotations

import errno
import json
import os
from importlib import metadata

import pytest

from stepfs._internal.limits import cgroup_limit
from stepfs.doctor import machine as checks
from stepfs.doctor.machine import Level
from stepfs.mount.host import mount_points
from stepfs.mount.host.mount_table import Mounted, source_of


@pytest.fixture
def machine(tmp_path):
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write.root = tmp_path  # type: ignore[attr-defined]
    return write


def test_no_fuse_device(machine):
    found = checks.check_fuse_device(machine.root)
    assert found.level is Level.FAIL
    assert "--device /dev/fuse" in found.remedy
    machine("dev/fuse", "")
    assert checks.check_fuse_device(machine.root).level is Level.OK


def test_fusermount_is_needed_by_users_only(machine):
    path = str(machine.root)
    assert checks.check_fusermount(is_root=True, path=path).level is Level.NOTE
    assert checks.check_fusermount(is_root=False, path=path).level is Level.FAIL
    machine("fusermount3", "")
    (machine.root / "fusermount3").chmod(0o755)
    assert "set-uid" in checks.check_fusermount(is_root=False, path=path).detail
    (machine.root / "fusermount3").chmod(0o4755)
    assert checks.check_fusermount(is_root=False, path=path).level is Level.OK


def test_a_user_needs_mtab_to_unmount(machine):
    (found,) = checks.check_mtab(is_root=False, root=machine.root)
    assert found.level is Level.FAIL
    assert "ln -s /proc/mounts /etc/mtab" in found.remedy
    assert not list(checks.check_mtab(is_root=True, root=machine.root))
    machine("etc/mtab", "")
    assert not list(checks.check_mtab(is_root=False, root=machine.root))


def test_allow_other_for_users(machine):
    machine("etc/fuse.conf", "# comment\n#user_allow_other\n")
    assert checks.check_rights(is_root=False, root=machine.root).level is Level.NOTE
    machine("etc/fuse.conf", "user_allow_other\n")
    assert checks.check_rights(is_root=False, root=machine.root).level is Level.OK
    assert checks.check_rights(is_root=True, root=machine.root).level is Level.OK


def test_memory_limit_of_cgroup_v2_is_the_least_on_the_way_up(machine):
    machine("proc/self/cgroup", "0::/pod/container\n")
    machine("sys/fs/cgroup/pod/container/memory.max", "max\n")
    machine("sys/fs/cgroup/pod/memory.max", str(400 << 20))
    machine("sys/fs/cgroup/memory.max", str(8 << 30))
    assert cgroup_limit(machine.root) == 400 << 20
    found = checks.check_memory(machine.root)
    assert found.level is Level.NOTE
    assert "--no-prime" in found.remedy


def test_memory_limit_inside_a_container_stands_at_the_base(machine):
    machine("proc/self/cgroup", "0::/kubepods/not/visible/here\n")
    machine("sys/fs/cgroup/memory.max", str(8 << 30))
    assert cgroup_limit(machine.root) == 8 << 30
    assert checks.check_memory(machine.root).level is Level.OK


def test_memory_limit_of_cgroup_v1(machine):
    machine("proc/self/cgroup", "4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n")
    machine("sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(2 << 30))
    assert cgroup_limit(machine.root) == 2 << 30
    machine("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712")
    assert cgroup_limit(machine.root) is None


def test_no_limit(machine):
    assert cgroup_limit(machine.root) is None
    assert checks.check_memory(machine.root).level is Level.OK


def test_kernel_settings_that_cannot_be_reached(machine):
    levels = {found.subject: found.level for found in checks.check_kernel(machine.root)}
    assert levels["read-ahead"] is Level.NOTE
    assert levels["fusectl"] is Level.NOTE
    (machine.root / "sys/fs/fuse/connections").mkdir(parents=True)
    found = {found.subject: found for found in checks.check_kernel(machine.root)}
    assert found["fusectl"].level is Level.OK


def test_packages_that_are_absent(monkeypatch):
    declared = [
        "boto3>=1", "trio", 'torch>=2; extra == "torch"', 'tokenizers; extra == "text"', 'stepfs[text]; extra == "all"'
    ]  # fmt: skip

    def version(package):
        if package != "boto3":
            raise metadata.PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(metadata, "requires", lambda _: declared)
    monkeypatch.setattr(metadata, "version", version)
    shown = {found.subject: found for found in checks.check_python()}
    assert (shown["packages"].level, shown["packages"].detail) == (Level.FAIL, "not installed: trio")
    assert (shown["extra text"].level, shown["extra text"].detail) == (Level.NOTE, "not installed: tokenizers")
    assert "stepfs[torch]" in shown["extra torch"].remedy
    assert "extra all" not in shown


@pytest.fixture
def answers(monkeypatch):
    """What listing a directory gives, by the name of the mount point; the directories themselves are not there."""
    found = {"stale": OSError(errno.ENOTCONN, "Transport endpoint is not connected"), "alive": ["status.json"]}
    monkeypatch.setattr(mount_points, "list_within", lambda directory, *_, **__: found[directory.parent.name])
    return found


def test_stale_and_stacked_mounts(monkeypatch, tmp_path, answers):
    table = [
        Mounted("0:50", str(tmp_path / "alive"), "fuse.stepfs", "file:///lake"),
        Mounted("0:51", str(tmp_path / "stale"), "fuse.stepfs", "file:///lake"),
        Mounted("0:52", str(tmp_path / "stale"), "fuse.stepfs", "file:///lake"),
        Mounted("0:53", "/elsewhere", "ext4", "/dev/vda"),
    ]
    monkeypatch.setattr(checks, "mounts", lambda: table)
    found = [
        (finding.subject.removeprefix(f"mount {tmp_path}/"), finding.level, finding.detail)
        for finding in checks.check_mounts()
    ]
    assert [(subject, level) for subject, level, _ in found] == [
        ("alive", Level.NOTE),  # what it says of its lake cannot be read here
        ("stale", Level.FAIL),
        ("stale", Level.FAIL),
    ]
    assert "daemon is gone" in found[1][2]
    assert "stacked" in found[2][2]


@pytest.mark.parametrize(("trouble", "level"), [(None, Level.OK), ("another history: mount again", Level.FAIL)])
def test_a_mount_that_cannot_follow_its_lake_is_no_healthy_one(tmp_path, answers, trouble, level):
    alive = tmp_path / "alive"
    (alive / ".stepfs").mkdir(parents=True)
    (alive / ".stepfs/status.json").write_text(json.dumps({"store": {"reachable": True, "trouble": trouble}}))
    (alive / ".stepfs/config.json").write_text(json.dumps({"checkpoint_dir": None}))
    found = checks.check_alive(Mounted("0:50", str(alive), "fuse.stepfs", "file:///lake"))
    assert found.level is level
    assert trouble is None or trouble in found.detail


@pytest.mark.parametrize(
    ("holds", "watched", "told"), [
        ([], "ckpts", ""),
        (["checkpoint-7/trainer_state.json"], "ckpts", ""),
        (["epoch7.bin"], "ckpts", "holds 'epoch7.bin' and no complete checkpoint (torch DCP"),
        (["run-7/model.bin"], "ckpts/run-{N}/DONE", "no complete checkpoint (run-{N}/DONE)"),
        ([], "nowhere", "does not exist"),
    ],
)  # fmt: skip
def test_a_directory_that_holds_no_checkpoint_is_named(tmp_path, answers, holds, watched, told):
    alive = tmp_path / "alive"
    (alive / ".stepfs").mkdir(parents=True)
    (tmp_path / "ckpts").mkdir()
    for name in holds:
        (tmp_path / "ckpts" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "ckpts" / name).write_text('{"global_step": 7}')
    (alive / ".stepfs/status.json").write_text(json.dumps({"store": {"trouble": None}}))
    (alive / ".stepfs/config.json").write_text(json.dumps({"checkpoint_dir": str(tmp_path / watched)}))
    found = checks.check_alive(Mounted("0:50", str(alive), "fuse.stepfs", "file:///lake"))
    assert found.level is (Level.NOTE if told else Level.OK)
    assert told in found.remedy


@pytest.mark.parametrize("target", ["file:///another-lake", "another-directory"])
def test_a_mount_that_nobody_asked_about_fails_nothing(monkeypatch, tmp_path, answers, target):
    dead = Mounted("0:51", str(tmp_path / "stale"), "fuse.stepfs", "file:///lake")
    monkeypatch.setattr(checks, "mounts", lambda: [dead, dead])
    assert {finding.level for finding in checks.check_mounts(target)} == {Level.NOTE}
    for asked in (None, dead.source, f"{dead.source}/", dead.directory):
        assert Level.FAIL in {finding.level for finding in checks.check_mounts(asked)}


def test_a_lake_is_known_by_the_name_that_its_mounts_have(monkeypatch, tmp_path, answers):
    lake = "s3://key:secret@bucket/date=2026, a/run/"
    dead = Mounted("0:51", str(tmp_path / "stale"), "fuse.stepfs", source_of(lake))
    monkeypatch.setattr(checks, "mounts", lambda: [dead])
    assert next(checks.check_mounts(lake)).level is Level.FAIL


def test_another_users_mount_is_not_called_dead(monkeypatch, tmp_path, answers):
    """EACCES says nothing of the daemon; the advice to clear it would end a stranger's training run."""
    theirs = Mounted("0:51", str(tmp_path / "theirs"), "fuse.stepfs", "file:///lake")
    monkeypatch.setattr(checks, "mounts", lambda: [theirs])
    for number in (errno.EACCES, errno.EIO, errno.ESTALE):
        answers["theirs"] = OSError(number, os.strerror(number))
        found = next(checks.check_mounts())
        assert found.level is Level.NOTE
        assert "clear" not in found.remedy
        assert "umount" not in found.remedy


def test_a_mount_that_hangs_is_given_up_by_force_first(monkeypatch, tmp_path, answers):
    """`umount -l` alone leaves its readers hanging, and nobody finds the connection any more."""
    hung = Mounted("0:51", str(tmp_path / "it hangs"), "fuse.stepfs", "file:///lake")
    monkeypatch.setattr(checks, "mounts", lambda: [hung])
    answers["it hangs"] = None
    found = next(checks.check_mounts())
    assert found.level is Level.FAIL
    forced, lazily = found.remedy.index("umount -f '"), found.remedy.index("umount -l '")
    assert forced < lazily


def test_every_problem_comes_with_what_to_do(machine):
    findings = [
        checks.check_fuse_device(machine.root),
        checks.check_fusermount(is_root=False, path=str(machine.root)),
        checks.check_rights(is_root=False, root=machine.root),
        *checks.check_kernel(machine.root),
        checks.check_directory(machine.root / "nothing"),
    ]
    for finding in findings:
        assert (finding.level is Level.OK) == (not finding.remedy), finding
