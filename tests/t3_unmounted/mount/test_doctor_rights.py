"""doctor tells root without CAP_SYS_ADMIN from root, and its bundle holds the logs of mounts that are not there."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from stepfs.doctor import environment
from stepfs.doctor.bundle import write_bundle
from stepfs.doctor.finding import Level
from stepfs.mount.daemon import log_file

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
    (tmp_path / "proc/self/status").write_text(
        f"Name:\tx\nCapEff:\t{effective}\nCapBnd:\t{bounding}\nSeccomp:\t0\n"
    )
    found = environment.check_rights(is_root=is_root, root=tmp_path)
    assert found.level is level
    assert ("may not mount" in found.detail) == (level is Level.FAIL)
    assert ("--cap-add SYS_ADMIN" in found.remedy) == (level is Level.FAIL)


def test_a_kernel_that_does_not_say_is_believed_to_allow_it(tmp_path):
    assert environment.check_rights(is_root=True, root=tmp_path).level is Level.OK


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
