"""doctor on real stores, directories and buckets that keep versions: what it says of them, and how it ends."""

from __future__ import annotations

import re

import pytest
from lakes import SLICES, commit, stepfs
from stubs3 import ABSENT, Answer

from stepfs.store.local.local_store import LocalStore


@pytest.fixture
def lake(file_url):
    assert stepfs("init", file_url, "--slices", SLICES).code == 0
    commit(file_url, range(3))
    return file_url


def test_a_lake(lake):
    ended = stepfs("doctor", lake)
    assert ended.code == 0
    for subject in ("python", "pyfuse3", "/dev/fuse", "memory", "conditional create"):
        assert re.search(rf"^ok    {re.escape(subject)} ", ended.out, re.MULTILINE), ended.out


def test_an_absent_lake_fails_with_3_and_says_what_to_do(tmp_path):
    ended = stepfs("doctor", (tmp_path / "nothing").as_uri())
    assert ended.code == 3
    assert re.search("^FAIL  lake .*stepfs init", ended.out, re.MULTILINE)
    assert not (tmp_path / "nothing").exists()


def test_a_directory_that_can_be_mounted_on(tmp_path):
    assert "can be mounted on" in stepfs("doctor", tmp_path).out


def test_directories_that_cannot(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert stepfs("doctor", tmp_path).code == 4
    assert stepfs("doctor", tmp_path / "nothing").code == 3
    assert stepfs("doctor", tmp_path / "file").code == 3
    assert stepfs("doctor", "/proc").code == 4


STATE = b"<VersioningConfiguration><Status>%s</Status></VersioningConfiguration>"
NOTE = "the bucket keeps versions: each mount with a group adds up to 2,880 a day"


@pytest.mark.parametrize(("status", "notes"), [(b"Enabled", 1), (b"Suspended", 0)])
def test_doctor_notes_a_bucket_that_keeps_versions(stub, status, notes):
    def answer(_method: str, path: str) -> Answer:
        return Answer(body=STATE % status) if path.endswith("?versioning") else ABSENT

    stub.answer = answer
    ended = stepfs("doctor", "s3://stepfs-tests/lake", "--endpoint-url", stub.endpoint_url)
    assert ended.code == 4  # the stub stores nothing, so its creates are refused; the note changes nothing
    found = re.findall("^note  versions .*", ended.out, re.MULTILINE)
    assert len(found) == notes
    assert all(NOTE in line for line in found)


@pytest.mark.parametrize("keeps", [True, False])
def test_init_says_it_in_one_line_and_succeeds(file_url, monkeypatch, keeps):
    class Versioned(LocalStore):  # no patch of LocalStore: isinstance with a protocol remembers what a class had
        async def keeps_versions(self) -> bool:
            return keeps

    monkeypatch.setattr("stepfs.store.opening.LocalStore", Versioned)
    ended = stepfs("init", file_url, "--slices", SLICES)
    assert ended.code == 0
    assert ended.out.startswith("created lake ")
    lines = ended.err.splitlines()
    assert len(lines) == keeps
    assert all(line.startswith(f"stepfs: {NOTE}") and "lifecycle rule" in line for line in lines)
