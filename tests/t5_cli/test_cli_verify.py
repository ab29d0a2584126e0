"""`stepfs verify` on real stores: what is damaged is named, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from lakes import SLICES, commit, payloads, stepfs
from payload_samples import npy

from stepfs.errors import UsageError
from stepfs_producer import Producer


def data_files(url: str) -> list[Path]:
    return sorted(Path(url.removeprefix("file://")).rglob("*.tgb"))


class TestVerify:
    def test_an_intact_lake(self, lake_url):
        stepfs("init", lake_url, "--slices", SLICES)
        commit(lake_url, range(5))
        ended = stepfs("verify", lake_url, "--json")
        of = {name: ended.document[name] for name in ("lake", "lake_id")}
        assert ended.document == {
            "schema": 1, **of, "steps": 5, "slices": 15, "bytes": sum(len(p) for step in range(5) for p in payloads(step)),
            "errors": [], "advice": [],
        }  # fmt: skip
        assert ended.code == 0
        assert stepfs("verify", lake_url).out.startswith("5 steps, 15 slices, ")

    @pytest.mark.parametrize(
        ("spoil", "problem"), [
            (lambda path: path.unlink(), "the object is missing"),
            (lambda path: os.truncate(path, path.stat().st_size - 1), "the object ends at byte"),
            (lambda path: flip(path, 64), "checksum mismatch"),
            (lambda path: flip(path, 0), "not a TGB object"), (lambda path: flip(path, -1), "footer"),
            (lambda path: flip(path, -40), "checksum mismatch"),
        ], ids=["missing", "truncated", "slice", "header", "footer", "index"],
    )  # fmt: skip
    def test_damage_is_named_and_exits_with_5(self, lake, spoil, problem):
        victim = data_files(lake)[1]
        spoil(victim)
        ended = stepfs("verify", lake, "--json")
        assert ended.code == 5
        (error,) = ended.document["errors"]
        assert error["key"].endswith(victim.name)
        assert problem in error["problem"]
        assert error["step"] in range(5)
        assert ended.document["steps"] == 5, "one damaged object does not stop the others"
        plain = stepfs("verify", lake)
        assert plain.code == 5
        assert victim.name in plain.err

    def test_a_damaged_slice_is_named_alone(self, lake):
        victim = data_files(lake)[0]
        content = victim.read_bytes()
        flip(victim, content.index(b"slice 2"))
        (error,) = stepfs("verify", lake, "--json").document["errors"]
        assert error["slice"] == 2

    def test_a_damaged_log_is_a_finding_too(self, lake):
        log = max(Path(lake.removeprefix("file://")).glob("*/log/*"))
        flip(log, -1)
        ended = stepfs("verify", lake, "--json")
        assert ended.code == 5
        assert len(ended.document["errors"]) == 1

    @pytest.mark.parametrize("damaged", [False, True], ids=["sound", "beside damage"])
    @pytest.mark.parametrize("room", ["data/*", "log", "control"])
    def test_what_a_later_version_wrote_is_no_damage_and_nothing_is_repaired(self, lake, room, damaged):
        """Though something else is damaged: who cannot read all advises no cut."""
        root = Path(lake.removeprefix("file://"))
        if room == "control":
            assert stepfs("checkpoint", lake, "--group", "run", 1, "--new-group").code == 0
        of_format_2(max(root.glob(f"*/{room}/*")))
        if damaged:
            flip(min(root.glob("*/data/*/*")), 64)
        before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for words in ([], ["--repair"]):
            ended = stepfs("verify", lake, *words)
            assert (ended.code, ended.out) == (4, "")
            assert ended.err.endswith("upgrade stepfs\n")
        assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def of_format_2(path: Path) -> None:
    """Sound, but in another format: an envelope, or the header of a TGB."""
    data = path.read_bytes()
    is_tgb = data.startswith(b"stepfs-tgb\n")
    head = data[:11] + b"\2" + data[12:60] if is_tgb else data[:7] + b"\2" + data[8:12]
    rest = data[len(head) + 4 :]
    covered = b"" if is_tgb else rest
    path.chmod(0o644)
    path.write_bytes(head + crc32c(covered, crc32c(head)).to_bytes(4, "little") + rest)


def flip(path: Path, offset: int) -> None:
    """Damage one byte in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)


def commit_batches(url: str, *batches: list[bytes]) -> None:
    with Producer(url, producer_id="p") as producer:
        for batch in batches:
            producer.append(batch, position=0)


def test_a_fork_keeps_the_promise_and_verify_looks_at_every_slice(file_url: str, tmp_path: Path) -> None:
    assert stepfs("init", file_url, "--slices", SLICES, "--ext", ".npy", "--check-payload").code == 0
    good = [npy(np.array([slice_])) for slice_ in range(SLICES)]
    commit_batches(file_url, good)
    fine = stepfs("verify", file_url, "--check-payload", "--json")
    assert (fine.code, fine.document["errors"]) == (0, [])
    commit_batches(file_url, good, [good[0], b"raw" * 1000, b""])  # only the first batch was looked at
    assert stepfs("verify", file_url).code == 0
    found = stepfs("verify", file_url, "--check-payload", "--json")
    assert found.code == 5
    assert [(damage["step"], damage["slice"]) for damage in found.document["errors"]] == [(2, 1), (2, 2)]
    assert "is no .npy file" in found.document["errors"][0]["problem"]
    assert "it is empty" in found.document["errors"][1]["problem"]
    assert "--skip 2:" in found.document["advice"][0]

    fork = f"file://{tmp_path / 'fork'}"
    assert stepfs("fork", file_url, fork, "--skip", "2:").code == 0
    assert stepfs("verify", fork, "--check-payload").code == 0
    with pytest.raises(UsageError, match=r"payload 0 is no \.npy file"):
        commit_batches(fork, [b"raw"] * SLICES)


def test_an_extension_that_cannot_be_told_is_refused_before_there_is_a_lake(file_url: str) -> None:
    refused = stepfs("init", file_url, "--slices", 1, "--ext", ".bin", "--check-payload")
    assert refused.code == 2
    assert "nothing tells a .bin file from other bytes" in refused.err
    assert ".safetensors" in refused.err
    assert stepfs("init", file_url, "--slices", 1, "--ext", ".bin").code == 0
    assert "nothing tells a .bin file" in stepfs("verify", file_url, "--check-payload").err


def test_content_is_looked_at_where_it_was_never_promised_too(file_url: str) -> None:
    stepfs("init", file_url, "--slices", 1, "--ext", ".npy")
    commit_batches(file_url, [b"raw"])
    assert stepfs("verify", file_url).code == 0
    assert stepfs("verify", file_url, "--check-payload").code == 5
