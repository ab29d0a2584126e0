"""init, ls and status on real stores: documents, names, exit codes, and what bad input gets."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import crc32c
import trio
from lakes import SLICES, payloads, stepfs

from stepfs.format.ids import Step
from stepfs.format.node import NodeRecord
from stepfs.lake.control import Group
from stepfs.lake.fleet import write_node
from stepfs.lake.identity import open_lake
from stepfs.store.opening import open_store
from stepfs_producer import Producer


def register_group(url: str, name: str, *next_steps: int) -> None:
    async def main() -> None:
        store = open_store(url)
        group = Group.of(store, await open_lake(store), name)
        await group.register()
        for step in next_steps:
            await group.add(Step(step))
        await store.aclose()

    trio.run(main)


def tell_node(url: str, **said: object) -> None:
    """What a mount would say of itself."""
    usual = NodeRecord("train", "node", "/mnt", 7, "1.0", Step(5), Step(3), 125, 0)

    async def main() -> None:
        store = open_store(url)
        await write_node(store, await open_lake(store), dataclasses.replace(usual, **said))
        await store.aclose()

    trio.run(main)


class TestInit:
    def test_creates_a_lake_once(self, lake_url):
        ended = stepfs("init", lake_url, "--slices", 8, "--ext", ".npy")
        assert (ended.code, ended.err) == (0, "")
        assert "rank-00000.npy … rank-00007.npy" in ended.out
        again = stepfs("init", lake_url, "--slices", 8)
        assert again.code == 4
        assert "is a lake already (8 slices, .npy)" in again.err
        assert stepfs("ls", lake_url, "--json").document["ext"] == ".npy"

    def test_a_lake_says_what_its_slices_are_of(self, file_url):
        ended = stepfs("init", file_url, "--data-ranks", 2, "--micro-batches", 3, "--cp", 2, "--ext", ".pt")
        assert "rank-00000.micro-0000.pt … rank-00003.micro-0002.pt" in ended.out
        assert "(12 slices (ranks 2 × micro-batches 3 × cp 2), .pt)" in stepfs("status", file_url).out
        grid = {"ranks": 2, "micro": 3, "cp": 2, "files": [""]}
        for command in ("ls", "status"):
            document = stepfs(command, file_url, "--json").document
            assert (document["slices"], document["grid"]) == (12, grid)
        with Producer(file_url, producer_id="p") as producer:
            producer.append([b"x"] * 12, position=1)
        names = [line.removesuffix(".pt") for line in stepfs("ls", file_url, "--step", 0).out.splitlines()]
        assert names[:5] == [f"rank-0000{r}.micro-000{m}" for r, m in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
        files = stepfs("ls", file_url, "--step", 0, "--json").document["steps"][0]["files"]
        assert [file["name"].removesuffix(".pt") for file in files] == names
        assert stepfs("fork", file_url, f"{file_url}-fork").code == 0
        assert stepfs("ls", f"{file_url}-fork", "--json").document["grid"] == grid
        again = stepfs("init", file_url, "--slices", 12)
        assert "12 slices (ranks 2 × micro-batches 3 × cp 2)" in again.err

    def test_a_directory_without_rights_or_a_file_in_the_way_is_one_line(self, tmp_path):
        (tmp_path / "file").write_bytes(b"")
        ended = stepfs("init", (tmp_path / "file").as_uri(), "--slices", 1)
        assert ended.code != 0
        assert ended.err.count("\n") == 1


class TestLs:
    def test_plain_output_is_what_ls_of_the_mount_prints(self, lake):
        ended = stepfs("ls", lake)
        assert ended.out.splitlines() == [f"step-{step:09d}" for step in range(5)]
        assert (ended.code, ended.err) == (0, "")

    def test_one_step(self, lake):
        assert stepfs("ls", lake, "--step", 2).out.splitlines() == [
            "rank-00000.safetensors",
            "rank-00001.safetensors",
            "rank-00002.safetensors",
        ]

    def test_document(self, lake):
        before = time.time()
        document = stepfs("ls", lake, "--json").document
        assert list(document) == [
            "schema", "lake", "lake_id", "slices", "grid", "ext", "first_step", "next_step", "steps",
        ]  # fmt: skip
        assert (document["slices"], document["ext"]) == (SLICES, ".safetensors")
        assert (document["first_step"], document["next_step"]) == (0, 5)
        assert re.fullmatch("[0-9a-f]{32}", document["lake_id"])
        assert [entry["step"] for entry in document["steps"]] == list(range(5))
        for step, entry in enumerate(document["steps"]):
            assert list(entry) == ["step", "version", "time", "producer", "epoch", "bytes"]
            assert entry["producer"] == ("tok-0" if step < 3 else "tok-1")
            assert entry["epoch"] == 1
            assert entry["bytes"] == sum(map(len, payloads(step)))
            assert abs(entry["time"] - before) < 60, "seconds, as in st_mtime"

    def test_document_of_one_step(self, lake):
        document = stepfs("ls", lake, "--step", 3, "--json").document
        (entry,) = document["steps"]
        assert entry["step"] == 3
        assert entry["files"] == [
            {
                "name": f"rank-{rank:05d}.safetensors",
                "size": len(payload),
                "crc32c": f"{crc32c.crc32c(payload):08x}",
            }
            for rank, payload in enumerate(payloads(3))
        ]

    def test_empty_lake(self, file_url):
        stepfs("init", file_url, "--slices", 1)
        assert stepfs("ls", file_url).out == ""
        assert stepfs("ls", file_url, "--json").document["steps"] == []

    def test_absent_things_exit_with_3(self, lake, tmp_path):
        assert stepfs("ls", lake, "--step", 5).code == 3
        nothing = stepfs("ls", (tmp_path / "nothing").as_uri())
        assert nothing.code == 3
        assert "stepfs init" in nothing.err
        assert not (tmp_path / "nothing").exists(), "looking creates nothing"

    def test_a_directory_is_not_a_lake(self, tmp_path):
        ended = stepfs("ls", tmp_path)
        assert ended.code == 2
        assert tmp_path.as_uri() in ended.err


class TestStatus:
    def test_document(self, lake):
        register_group(lake, "train", 2, 4)
        document = stepfs("status", lake, "--json").document
        assert list(document) == [
            "schema", "lake", "lake_id", "slices", "grid", "ext", "replica_of", "head", "digest", "time", "first_step", "next_step",
            "frontier", "sealed", "total_bytes", "total_records", "live_bytes", "producers", "groups", "paces", "nodes",
            "origins", "problems",
        ]  # fmt: skip
        assert (document["schema"], document["slices"], document["ext"]) == (1, SLICES, ".safetensors")
        assert document["total_bytes"] == sum(len(p) for step in range(5) for p in payloads(step))
        assert document["live_bytes"] == document["total_bytes"]
        assert document["nodes"] == []
        assert document["frontier"] == 4
        assert document["sealed"] is False
        assert document["groups"] == {
            "train": {"need": 2, "kept": [2, 4], "held_bytes": document["live_bytes"] * 3 // 5, "held_for": None}
        }
        assert set(document["producers"]) == {"tok-0", "tok-1"}
        assert document["producers"]["tok-0"]["next_seq"] == 3
        assert document["head"] == max(producer["version"] for producer in document["producers"].values())

    def test_empty_lake(self, file_url):
        stepfs("init", file_url, "--slices", 1)
        document = stepfs("status", file_url, "--json").document
        assert (document["head"], document["frontier"], document["producers"]) == (-1, -1, {})

    def test_for_people(self, lake):
        register_group(lake, "train", 2)
        out = stepfs("status", lake).out
        assert "0…4  (5 live, 5 committed)" in out
        assert re.search(r"^tok-1 +1 +2 ", out, re.MULTILINE)
        assert re.search(r"^train +2 +1 +3 +12.4 KiB$", out, re.MULTILINE)

    def test_retired_groups_no_longer_count(self, lake):
        register_group(lake, "train", 2)

        async def retire() -> None:
            store = open_store(lake)
            await Group.of(store, await open_lake(store), "train").retire()

        trio.run(retire)
        assert stepfs("status", lake, "--json").document["groups"] == {}

    def test_mounts_of_groups_and_those_that_fell_silent(self, lake):
        now_ms = int(time.time() * 1000)
        register_group(lake, "train")
        tell_node(lake, host="node-1", directory="/mnt/run", time_ms=now_ms)
        tell_node(lake, host="node-0", directory="/mnt/\x1b[2J", time_ms=now_ms - 100_000, read_to=Step(0))
        silent, live = stepfs("status", lake, "--json").document["nodes"]
        assert live == {
            "group": "train", "host": "node-1", "directory": "/mnt/run", "pid": 7, "stepfs": "1.0", "frontier": 4,
            "last_step": 2, "waited_ratio": 0.125, "causes": {}, "time": now_ms / 1000, "stale": False,
        }  # fmt: skip
        assert (silent["host"], silent["last_step"], silent["stale"]) == ("node-0", None, True)
        out = stepfs("status", lake).out
        assert re.search(r"^node-1 +/mnt/run +train +4 +2 +12\.5 % +\S+Z$", out, re.MULTILINE)
        assert re.search(r"^node-0 +/mnt/\?\[2J +train +4 +none +12\.5 % +\S+Z \(stale\)$", out, re.MULTILINE)

    def test_of_a_mount_is_what_its_daemon_says(self, tmp_path):
        (tmp_path / ".stepfs").mkdir()
        said = {"lake_id": "x", "frontier": 7, "cache": {"bytes": 12}}
        (tmp_path / ".stepfs" / "status.json").write_text(json.dumps(said))
        assert stepfs("status", tmp_path, "--json").document == said
        lines = stepfs("status", tmp_path).out.splitlines()
        assert [line.split()[0] for line in lines if line][1:] == [
            "steps", "readers", "reading", "fetched", "cache", "store"
        ]  # fmt: skip

    def test_of_what_is_no_mount_exits_with_3(self, tmp_path):
        assert "is not a stepfs mount" in stepfs("status", tmp_path).err
        ended = stepfs("status", tmp_path / "nothing")
        assert ended.code == 3
        assert "does not exist" in ended.err
