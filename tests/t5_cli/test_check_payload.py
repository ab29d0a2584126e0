"""`init --check-payload`: a lake that says what its slices are, its forks, and `verify --content`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from lakes import SLICES, stepfs

from stepfs.errors import UsageError
from stepfs_producer import Producer


def npy(*values: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(values))
    return file.getvalue()


def commit(url: str, *batches: list[bytes]) -> None:
    with Producer(url, producer_id="p") as producer:
        for batch in batches:
            producer.append(batch, position=0)


def test_a_fork_keeps_the_promise_and_verify_looks_at_every_slice(file_url: str, tmp_path: Path) -> None:
    assert stepfs("init", file_url, "--slices", SLICES, "--ext", ".npy", "--check-payload").code == 0
    good = [npy(slice_) for slice_ in range(SLICES)]
    commit(file_url, good)
    fine = stepfs("verify", file_url, "--content", "--json")
    assert (fine.code, fine.document["errors"]) == (0, [])
    commit(file_url, good, [good[0], b"raw" * 1000, b""])  # only the first batch was looked at
    assert stepfs("verify", file_url).code == 0
    found = stepfs("verify", file_url, "--content", "--json")
    assert found.code == 5
    assert [(damage["step"], damage["slice"]) for damage in found.document["errors"]] == [(2, 1), (2, 2)]
    assert "is no .npy file" in found.document["errors"][0]["problem"]
    assert "it is empty" in found.document["errors"][1]["problem"]
    assert "--skip 2:" in found.document["advice"][0]

    fork = f"file://{tmp_path / 'fork'}"
    assert stepfs("fork", f"{file_url}@2", fork, "--skip", "2:").code == 0
    assert stepfs("verify", fork, "--content").code == 0
    with pytest.raises(UsageError, match=r"payload 0 is no \.npy file"):
        commit(fork, [b"raw"] * SLICES)


def test_an_extension_that_cannot_be_told_is_refused_before_there_is_a_lake(file_url: str) -> None:
    refused = stepfs("init", file_url, "--slices", 1, "--ext", ".bin", "--check-payload")
    assert refused.code == 2
    assert "nothing tells a .bin file from other bytes" in refused.err
    assert ".safetensors" in refused.err
    assert stepfs("init", file_url, "--slices", 1, "--ext", ".bin").code == 0
    assert "nothing tells a .bin file" in stepfs("verify", file_url, "--content").err


def test_content_is_looked_at_where_it_was_never_promised_too(file_url: str) -> None:
    stepfs("init", file_url, "--slices", 1, "--ext", ".npy")
    commit(file_url, [b"raw"])
    assert stepfs("verify", file_url).code == 0
    assert stepfs("verify", file_url, "--content").code == 5
