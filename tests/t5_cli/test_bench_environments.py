"""A peer that cannot be installed is a row with pip's reason, and is tried again by the next run."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.environments import NotInstalledError, environment, home
from bench_train.peers import command
from bench_train.peers.catalogue import Peer
from bench_train.peers.job import Data

ABSENT = "stepfs-has-no-such-package==0"


@pytest.fixture
def no_index(tmp_path, monkeypatch):
    """pip finds nothing, and asks nobody."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def test_a_peer_that_cannot_be_installed_is_skipped_with_pips_reason_and_tried_again(no_index):
    said = []
    bed = SimpleNamespace(report=SimpleNamespace(say=said.append))
    peer = Peer("absent", "mosaicml", (ABSENT,))
    for attempt in (1, 2):
        found = command.measured(bed, None, None, peer, Data("text", "", 1, 1), None)
        assert found.trouble.startswith("skipped: ERROR: No matching distribution")
        assert found.samples_per_s is None
        assert len(said) == attempt


@pytest.mark.slow  # pip into two new environments
def test_an_environment_finds_this_projects_packages_and_keeps_its_torch(no_index, monkeypatch):
    said = []
    python = environment("numbers", ["numpy"], said.append) / "python"  # which is there already
    (place,) = home().glob("numbers-*")
    assert python.is_relative_to(place)
    assert (place / "constraints.txt").read_text() == f"torch=={version('torch').partition('+')[0]}\n"
    (shared,) = place.glob("lib/python*/site-packages/shared_with_stepfs.pth")
    shared.write_text("/another/checkout\n")
    assert environment("numbers", ["numpy"], said.append) == python.parent
    assert Path(shared.read_text().strip()).joinpath("numpy").is_dir()
    assert len(said) == 1  # installed once


def test_pip_that_is_not_there_is_a_reason_too(no_index, monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(NotInstalledError, match="ended with 1"):
        environment("numbers", ["numpy"], [].append)
