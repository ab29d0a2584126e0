"""Finding complete checkpoints in the layouts of the trainers that people use."""

from __future__ import annotations

import errno
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from stepfs.checkpoints.formats import Found, NextStep, Place, look
from stepfs.errors import AbsentError, UsageError


def counters(directory: Path, pattern: str = "") -> set[int]:
    found = looked(directory, pattern)
    assert not found.barred
    return set(found.complete)


def looked(directory: Path, pattern: str = "") -> Found:
    return look(Place.parse(f"{directory}/{pattern}" if pattern else str(directory)))


def test_torch_dcp_counts_once_its_metadata_is_there(tmp_path: Path) -> None:
    for name in ("step-100", "step-200", "no-number"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"shard")
    (tmp_path / "step-100" / ".metadata").write_bytes(b"m")
    (tmp_path / "step-200" / ".metadata").touch()
    (tmp_path / "no-number" / ".metadata").write_bytes(b"m")
    assert counters(tmp_path) == {100}


def test_hugging_face_counts_once_its_trainer_state_is_whole(tmp_path: Path) -> None:
    for number, text in ((100, json.dumps({"global_step": 100})), (200, '{"global_st'), (300, '{"global_step": 1}')):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-400").mkdir()
    assert counters(tmp_path) == {100}


def test_lightning_counts_readable_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "epoch=0-step=50.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    whole = (tmp_path / "epoch=0-step=50.ckpt").read_bytes()
    (tmp_path / "epoch=1-step=99.ckpt").write_bytes(whole[:-30])
    (tmp_path / "last.ckpt").write_bytes(whole)
    assert counters(tmp_path) == {50}


@pytest.mark.parametrize("comment", [b"", b"a comment"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_an_archive_counts_when_its_last_byte_is_there(tmp_path: Path, comment: bytes, size: int) -> None:
    path = tmp_path / "step=7.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("data.pkl", "w", force_zip64=True) as file:
            file.write(bytes(size))
        archive.comment = comment
    whole = path.read_bytes()
    assert counters(tmp_path) == {7}
    for missing in (1, 2, 21, 22, 23, len(whole) // 2, len(whole)):
        path.write_bytes(whole[:-missing])
        assert counters(tmp_path) == set(), missing
    path.write_bytes(whole + b"\0")
    assert counters(tmp_path) == set()


def test_megatron_counts_up_to_its_latest_iteration(tmp_path: Path) -> None:
    for number in (10, 20, 30):
        (tmp_path / f"iter_{number:07d}").mkdir()
    assert counters(tmp_path) == set()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert counters(tmp_path) == {10, 20}


def test_a_pattern_names_the_file_that_says_done(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"run-{number}").mkdir()
    (tmp_path / "run-1" / "DONE").touch()
    (tmp_path / "run-x").mkdir()
    (tmp_path / "run-x" / "DONE").touch()
    assert counters(tmp_path, "run-{N}/DONE") == {1}
    with pytest.raises(UsageError, match="once"):
        Place.parse("/ckpts/{N}/{N}")


def test_an_absent_directory_is_not_an_empty_one(tmp_path: Path) -> None:
    assert counters(tmp_path) == set()
    with pytest.raises(AbsentError, match="does not exist"):
        counters(tmp_path / "unmounted")


@pytest.mark.parametrize(
    ("text", "counter", "step"), [("N", 7, 7), ("N+1", 7, 8), ("N*4", 7, 28), ("(N + 1) * 2 // 4", 7, 4), ("N-1", 1, 0)]
)
def test_the_next_step_is_what_the_user_says(text: str, counter: int, step: int) -> None:
    assert NextStep(text)(counter) == step


@pytest.mark.parametrize(
    "text", [
        "", "M", "N**9", "N/2", "__import__('os')", "N//0", "N(1)", "-N", "9" * 65, "N if N else 1",
        "True", "N-2",
    ],
)  # fmt: skip
def test_anything_but_simple_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        NextStep(text)


@pytest.mark.parametrize("layout", ["hugging face", "lightning", "torch dcp", "a pattern", "the directory"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.EMFILE])
def test_what_cannot_be_read_is_an_error_and_not_a_deleted_checkpoint(tmp_path, monkeypatch, layout, number):
    """Else one hiccup of a network file system drops a checkpoint, and the steps it needs may be deleted."""
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        (tmp_path / f"dcp-{step}").mkdir()
        (tmp_path / f"dcp-{step}" / ".metadata").write_bytes(b"m")
        with zipfile.ZipFile(tmp_path / f"step={step}.ckpt", "w") as archive:
            archive.writestr("data.pkl", b"x")
    pattern = "dcp-{N}/.metadata" if layout == "a pattern" else ""
    assert counters(tmp_path, pattern) == {5, 10}
    bad = {"hugging face": "trainer_state.json", "lightning": "step=5.ckpt", "the directory": tmp_path.name}
    for name in ("open", "stat", "iterdir"):
        real = getattr(Path, name)

        def fails(path: Path, *arguments: Any, real: Any = real, **options: Any) -> Any:
            if path.name == bad.get(layout, ".metadata"):
                raise OSError(number, "out of reach")
            return real(path, *arguments, **options)

        monkeypatch.setattr(Path, name, fails)
    if number == errno.EACCES and layout != "the directory":  # a neighbour's, perhaps
        found = looked(tmp_path, pattern)
        complete = {"hugging face": {5, 10}, "lightning": {5, 10}}.get(layout, set())  # in another layout as well
        if layout == "torch dcp":
            complete = {5, 10}
        assert (found.complete, found.barred) == (complete, {5, 10} - complete)
        return
    with pytest.raises(OSError, match="out of reach"):
        counters(tmp_path, pattern)
