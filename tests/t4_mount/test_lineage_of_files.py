"""The inode of a file says which slice it is: for `stepfs-produce lineage`, and for file handles as an NFS export uses them."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import struct
from functools import partial
from pathlib import Path
from typing import Any

import forked
import json_schemas
import pytest
from realmount import lake_with, mounted, stepfs, until

PLAN = """\
version: 1
output: {mesh: "dp=2", sequence_length: 128, micro_batches: 2}
sources: {lines: {format: jsonl, files: lines/}}
"""


produce = partial(forked.ran, "stepfs_producer")


def document(*arguments: str | Path) -> dict[str, Any]:
    done = produce(["lineage", *arguments, "--json"])
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def one_line(code: int, words: str, *arguments: str | Path) -> None:
    done = produce(["lineage", *arguments])
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert words in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(400)  # many processes, beside others
def test_a_file_its_micro_batch_and_a_token_of_it(tmp_path: Path, file_url: str) -> None:
    (tmp_path / "lines").mkdir()
    texts = [json.dumps({"text": f"line {number} " + "x" * (number % 40)}) for number in range(400)]
    (tmp_path / "lines/a.jsonl").write_text("\n".join(texts))
    (tmp_path / "plan.yaml").write_text(PLAN)
    produce(["run", tmp_path / "plan.yaml", file_url, "--limit-steps", 4, "--workers", 1]).check_returncode()
    whole = document(file_url, "--step", "3")["spans"]
    with mounted(file_url, tmp_path / "mnt", "--mesh", "dp=2,tp=2") as mount:
        for rank in range(4):
            path = mount.file(3, rank, ".safetensors")
            assert document(path)["spans"] == [span for span in whole if span["rank"] == rank // 2]
        last = [span for span in whole if (span["rank"], span["micro"]) == (1, 1)]
        assert document(f"{path}:1")["spans"] == last
        viewed = produce(["view", path, "--micro", "1", "--json"])
        rows = json.loads(viewed.stdout)["rows"]
        assert [(one["record"], one["tokens"]) for row in rows for one in row["documents"]] == [
            (span["record"], span["tokens"]) for span in last
        ]
        assert "".join(part["text"] for part in rows[0]["documents"][0]["parts"]).startswith("line ")
        refused = produce(["view", path.parent])
        assert (refused.returncode, "is a step of several ranks; name a file" in refused.stderr) == (2, True)
        latest = mount.directory / "latest" / path.name
        token = last[1]["start"]
        shown = document(f"{latest}:1:{token}", "--text", "--plan-dir", tmp_path)
        json_schemas.check("produce-lineage", shown)
        assert [span["text"] for span in shown["spans"]] == [
            json.loads(text)["text"] for text in texts if json.loads(text)["text"] == shown["spans"][0]["text"]
        ]
        one_line(2, "token 128: a micro-batch has 128, from 0 on", f"{path}:1:128")
        one_line(2, "micro-batch 2: the file has 2, from 0 on", f"{path}:2")
        assert document(path.parent)["spans"] == document(latest.parent)["spans"] == whole
        one_line(2, "is a step of several ranks; name a file of it", f"{path.parent}:0")
        one_line(2, "is no step or file of a mount", mount.directory)
        for command in (
            ["find", "--source", "lines", "--file", "a", "--record", "0"],
            ["replay", "--steps", "0:1"],
        ):
            refused = produce([command[0], mount.directory, *command[1:]])
            assert refused.returncode == 2
            assert refused.stderr == (f"stepfs-produce: '{mount.directory}' is a mount of {file_url}; name that lake\n")
        one_line(2, "--step is for lakes", path, "--step", "3")
        one_line(2, "is no file of a step", mount.directory / ".stepfs/status.json")
        one_line(3, "no such file", mount.file(9, 0, ".safetensors"))
        shutil.copy(path, tmp_path / "lines/copied.safetensors")
        one_line(2, "is no step or file of a mount", tmp_path / "lines/copied.safetensors")
        told = json.loads((mount.directory / ".stepfs/steps/3.json").read_text())
        json_schemas.check("step", told)
        assert told["plan"]["digest"] == shown["plan"]
        assert told["plan"]["sources"]["lines"]["share"] == 1
        relative = os.path.relpath(path, mount.directory)
        done = produce(["lineage", relative], cwd=mount.directory)
        assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_every_name_of_another_mesh_is_that_micro_batch_of_the_plan(tmp_path: Path, file_url: str) -> None:
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.jsonl").write_text("\n".join(json.dumps({"text": f"line {number}"}) for number in range(200)))
    (tmp_path / "plan.yaml").write_text(PLAN.replace("micro_batches: 2", "micro_batches: 2, files: micro_batches"))
    produce(["run", tmp_path / "plan.yaml", file_url, "--limit-steps", 1, "--workers", 1]).check_returncode()
    whole = document(file_url)["spans"]
    with mounted(file_url, tmp_path / "mnt", "--mesh", "dp=1,tp=2") as mount:
        files = sorted((mount.directory / "step-000000000").iterdir())
        assert [path.name for path in files] == [
            f"rank-{rank:05}.micro-{micro:04}.safetensors" for rank in range(2) for micro in range(4)
        ]
        for number, path in enumerate(files):
            mine = [span for span in whole if divmod(number % 4, 2) == (span["rank"], span["micro"])]
            assert mine
            assert document(path)["spans"] == document(f"{path}:0")["spans"] == mine
        one_line(2, "micro-batch 1: the file has 1, from 0 on", f"{files[3]}:1")


_AT_FDCWD = -100
_HANDLE_BYTES = 128
_libc = ctypes.CDLL(None, use_errno=True)


def handle_of(path: Path) -> bytes:
    buffer = ctypes.create_string_buffer(struct.pack("Ii", _HANDLE_BYTES, 0), 8 + _HANDLE_BYTES)
    mount_id = ctypes.c_int()
    if _libc.name_to_handle_at(_AT_FDCWD, bytes(path), buffer, ctypes.byref(mount_id), 0) != 0:
        raise OSError(ctypes.get_errno(), "name_to_handle_at", str(path))
    return buffer.raw


def read_by_handle(mount: Path, handle: bytes) -> bytes:
    directory = os.open(mount, os.O_RDONLY)
    try:
        descriptor = _libc.open_by_handle_at(directory, ctypes.create_string_buffer(handle, len(handle)), os.O_RDONLY)
        if descriptor < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(directory)
    with open(descriptor, "rb") as file:
        return file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="open_by_handle_at is root's")
def test_a_handle_outlives_the_mount_that_gave_it_and_ends_with_its_step(tmp_path: Path) -> None:
    """Another mount of the lake stands for a server that was started again."""
    url = f"file://{tmp_path}/lake"
    batches = lake_with(url, 8)
    with mounted(url, tmp_path / "a") as first:
        handles = [handle_of(first.file(step, 1)) for step in range(8)]
    with mounted(url, tmp_path / "b", "--group", "g") as second:
        assert read_by_handle(second.directory, handles[5]) == batches[5][1]
        assert read_by_handle(second.directory, handles[1]) == batches[1][1]
        assert stepfs("checkpoint", second.directory, "--group", "g", "4").returncode == 0
        until(lambda: "step-000000003" not in second.steps(), "the checkpoint to be followed")
        for step in (0, 1, 3):
            with pytest.raises(OSError, match="tale") as raised:
                read_by_handle(second.directory, handles[step])
            assert raised.value.errno == errno.ESTALE
        assert read_by_handle(second.directory, handles[5]) == batches[5][1]
