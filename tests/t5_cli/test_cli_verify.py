"""`stepfs verify` on real stores: what is damaged is named, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lakes import SLICES, commit, payloads, stepfs


def data_files(url: str) -> list[Path]:
    return sorted(Path(url.removeprefix("file://")).rglob("*.tgb"))


class TestVerify:
    def test_an_intact_lake(self, lake_url):
        stepfs("init", lake_url, "--slices", SLICES)
        commit(lake_url, range(5))
        ended = stepfs("verify", lake_url, "--json")
        assert ended.document == {
            "schema": 1, "steps": 5, "slices": 15, "bytes": sum(len(p) for step in range(5) for p in payloads(step)),
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


def flip(path: Path, offset: int) -> None:
    """Damage one byte in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)
