"""Lakes, states and documents that released versions wrote (`scripts/lib/kept_lake.py`): each later one goes on with them."""

from __future__ import annotations

import base64
import fcntl
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import json_schemas
import pytest
from lakes import produce, stepfs

import kept_lake
from stepfs import Lake, ShuffledSteps, StreamState
from stepfs.csi.node import Volumes
from stepfs_producer import Producer

ARCHIVES = sorted(kept_lake.KEPT.glob("*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def archive(request) -> Iterator[Path]:
    """Its lakes name each other by the place that they were made in: one checkout at a time has it."""
    with open(f"{kept_lake.HERE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield request.param
        shutil.rmtree(kept_lake.HERE, ignore_errors=True)


@pytest.fixture
def kept(archive: Path) -> dict[str, Any]:
    """The manifest, beside all as it was."""
    shutil.rmtree(kept_lake.HERE, ignore_errors=True)
    kept_lake.HERE.mkdir()
    with tarfile.open(archive) as tar:
        tar.extractall(kept_lake.HERE, filter="data")
    return json.loads((kept_lake.HERE / "manifest.json").read_text())


def slices_of(kept: dict[str, Any], name: str) -> dict[int, list[bytes]]:
    return {int(step): [base64.b64decode(one) for one in each] for step, each in kept["lakes"][name]["steps"].items()}


@pytest.mark.parametrize("name", ["lake", "fork", "planned", "replica"])
def test_every_byte_is_read_and_every_check_holds(kept, name):
    url, expected = kept["lakes"][name]["url"], slices_of(kept, name)
    with Lake(url, prefetch=0) as lake:
        assert range(lake.first_step, lake.next_step) == range(min(expected), max(expected) + 1)
        assert {step: [bytes(lake[step][rank]) for rank in range(lake.slices)] for step in expected} == expected
        if name == "lake":
            assert [lake[step].note for step in (33, 34)] == [{"weights": 33}, None]
    checked = stepfs("verify", url, "--json")
    assert (checked.code, checked.document["errors"]) == (0, [])
    for command, schema in (("status", "status-lake"), ("ls", "ls")):
        json_schemas.check(schema, stepfs(command, url, "--json").document)


def test_a_producer_a_run_and_those_who_keep_the_lake_go_on(kept):
    url = kept["lakes"]["lake"]["url"]
    with Producer(url, producer_id="tok-0") as producer:
        assert producer.position == {"at": kept_lake.STEPS - 2}
        producer.append(kept_lake.payloads(200), position={"at": 200})
    groups = stepfs("status", url, "--json").document
    assert groups["groups"]["run"]["kept"] == [kept_lake.FIRST, 30]
    assert groups["paces"] == {"trainer": 40}
    assert stepfs("checkpoint", url, "30", "--group", "run", "--keep", "1", "--json").document["need"] == 30
    assert stepfs("reclaim", url, "--json").document["first_live_step"] == kept_lake.FIRST, "the fork needs them"
    fork = kept["lakes"]["fork"]["url"]
    assert stepfs("verify", fork).code == 0
    with Lake(fork, prefetch=0) as lake:
        assert bytes(lake[kept_lake.FIRST][1]) == kept_lake.payloads(kept_lake.FIRST)[1]


def test_a_plan_is_replayed_goes_on_and_reaches_its_replica(kept):
    plan, url, copy = kept_lake.HERE / "plan", kept["lakes"]["planned"]["url"], kept["lakes"]["replica"]["url"]
    steps = len(kept["lakes"]["planned"]["steps"])
    again = produce("replay", url, "--steps", f"0:{steps}", "--plan-dir", plan, "--workers", 1)
    assert again.code == 0, again.out + again.err
    spans = produce("lineage", url, "--step", 3, "--json").document["spans"]
    assert {span["source"] for span in spans} <= {"answers", "pictures", "prose"}
    more = produce("run", plan / "plan.yaml", url, "--limit-steps", steps + 2, "--workers", 1, "--json")
    assert more.code == 0, more.err
    assert more.document["total"]["steps"] == steps + 2
    assert stepfs("replicate", url, copy).code == 0
    with Lake(copy, prefetch=0) as lake, Lake(url, prefetch=0) as home:
        assert lake.next_step == home.next_step == steps + 2


def test_what_a_trainer_saved_is_loaded(kept):
    states, url = kept["states"], kept["lakes"]["lake"]["url"]
    with Lake(url, prefetch=0) as lake:
        stream = StreamState.of_lake(lake)
        stream.load_state_dict(states["stream"])
        assert stream.next_step == 33
        order = ShuffledSteps(lake, first=30, stop=kept_lake.STEPS, seed=7)
        order.load_state_dict(states["order"], position=5)
        assert [*order] == states["rest"]
    for name, schema in (("config", "config"), ("status", "status-mount")):
        json_schemas.check(schema, states[name])


def test_a_volume_of_a_node_keeps_its_attributes(kept, tmp_path):
    """`volume.json` lies on nodes, and a plugin of a later version compares with it."""
    volumes = Volumes(tmp_path / "base", tmp_path / "holder.sock")
    directory = volumes._directory("v")
    directory.mkdir(parents=True)
    (directory / "volume.json").write_text(json.dumps(kept["volume"]))
    assert volumes.known() == [(directory, "v")]
    assert volumes._changes("v", kept["volume"]["attributes"]) == ""
    assert "ranks is '0-1', not None" in volumes._changes("v", {"lake": kept["volume"]["attributes"]["lake"]})
