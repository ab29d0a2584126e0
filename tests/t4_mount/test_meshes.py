"""One lake under trainers of several sizes: the global batch is the same, and so is every inode."""

from __future__ import annotations

import json

import numpy as np
import pytest
from payload_samples import npy
from realmount import make_lake, mounted, produce, stepfs, until

from stepfs.format.grid import Grid
from stepfs_producer import Producer

GRID = Grid(2, micro=4)


@pytest.fixture
def batches(file_url):
    make_lake(file_url, slices=GRID)
    return produce(file_url, 3, slices=GRID.slices)


@pytest.mark.parametrize(
    ("mesh", "own", "peers"), [("dp=2", 4, 1), ("dp=1,tp=2", 8, 2), ("pp=2,dp=4,cp=2", 2, 4), ("dp=8", 1, 1)]
)
def test_a_mesh_of_any_size_that_divides_reads_the_same_global_batch(file_url, tmp_path, batches, mesh, own, peers):
    with mounted(file_url, tmp_path / "m", "--mesh", mesh) as mount:
        read: dict[int, bytes] = {}
        for rank in range(mount.status()["world"]):
            files = sorted(mount.step(1).glob(f"rank-{rank:05d}.*"))
            slices = [(file.stat().st_ino & ((1 << 20) - 1)) - 1 for file in files]
            assert slices == list(range(slices[0], slices[0] + own))
            assert {file.stat().st_nlink for file in files} == {peers}
            read |= {index: file.read_bytes() for index, file in zip(slices, files, strict=True)}
        assert [read[index] for index in range(GRID.slices)] == batches[1]
        status = mount.status()
        assert status["micro_batches"] == mount.config()["micro_batches"] == own
        assert status["data"]["bytes_fetched"] <= 1.02 * sum(map(len, batches[1])) * 3, "peers fetch once"


def test_what_a_rank_reads_is_fetched_and_primed_by_micro_batch(file_url, tmp_path, batches):
    options = ["--mesh", "dp=4", "--ranks", "2", "--prefetch", "2", "--steps", "0:3"]
    with mounted(file_url, tmp_path / "m", *options) as mount:
        own = sorted(mount.step(0).glob("rank-00002.*"))
        assert [file.name for file in own] == ["rank-00002.micro-0000.bin", "rank-00002.micro-0001.bin"]
        assert own[0].read_bytes() == batches[0][4]
        until(lambda: mount.status()["data"]["primed_files"] >= 5, lambda: str(mount.status()["data"]))
        fetched = mount.status()["data"]["bytes_fetched"]
        own_bytes = sum(len(batch[index]) for batch in batches for index in (4, 5))
        assert own_bytes <= fetched < own_bytes + 1000, "and no other file, of 2000 bytes at least"
        assert [file.read_bytes() for step in range(3) for file in sorted(mount.step(step).glob("rank-00002.*"))] == [
            batch[index] for batch in batches for index in (4, 5)
        ]
        assert mount.status()["data"]["bytes_fetched"] == fetched


def test_a_node_of_peers_fetches_what_its_ranks_need_once(file_url, tmp_path, batches):
    node = range(48, 64)  # the ranks with pp 1 and dp 1
    options = ["--mesh", "pp=4,dp=2,cp=2,tp=8", "--ranks", f"{node[0]}-{node[-1]}", "--steps", "0:3"]
    with mounted(file_url, tmp_path / "m", *options) as mount:
        for step, batch in enumerate(batches):
            for rank in node:
                files = sorted(mount.step(step).glob(f"rank-{rank:05d}.*"))
                assert [file.read_bytes() for file in files] == batch[4:]
        needed = sum(len(payload) for batch in batches for payload in batch[4:])
        assert needed <= mount.status()["data"]["bytes_fetched"] <= 1.02 * needed


REFUSED = [
    (["--mesh", "dp=3"], "do not divide the 8 ranks × micro-batches of this lake; dp=2 and dp=4 would"),
    (["--world", "4", "--mesh", "dp=8"], "--world 4 contradicts --mesh dp=8"),
    (["--world", "1"], "use a multiple of 2, or --mesh dp=1 for as many data ranks"),
    (["--mesh", "tp=2"], "it has no data dimension; add one, such as dp=4"),
    (["--mesh", "data=4"], "data looks like a data dimension and is none; call it dp"),
    (["--mesh", "dp=4", "--ranks", "4"], "there is no rank 4: here are 4 ranks"),
]


def test_a_size_that_the_grid_cannot_serve_is_refused_in_a_line_with_the_way_out(file_url, tmp_path, batches):
    (tmp_path / "m").mkdir()
    for options, said in REFUSED:
        done = stepfs("mount", file_url, tmp_path / "m", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_commands_that_take_a_mount_show_what_it_shows(file_url, tmp_path):
    """`--rank 1` of a mesh of peers reads slice 0; the lake's own rank 1 reads slice 1."""
    assert stepfs("init", file_url, "--slices", "4", "--ext", ".npy").returncode == 0
    with Producer(file_url, producer_id="p") as producer:
        for step in range(6):
            producer.append([npy(np.full(2, 10 * step + index)) for index in range(4)], position=step)

    def said(*words):
        done = stepfs(*words)
        return done.stdout if done.returncode == 0 else done.stderr

    def document(*words):
        return json.loads(said(*words, "--json"))

    with mounted(file_url, tmp_path / "m", "--mesh", "dp=4,tp=2", "--steps", "2:6") as mount:
        directory = mount.directory
        shown = document("show", directory, "--rank", "3")
        assert (shown["step"], shown["rank"], shown["arrays"][0]["values"]) == (5, 3, [51, 51])
        assert said("show", directory, "--rank", "3").startswith("step-000000005/rank-00003.npy")
        assert "there are 8 ranks here" in said("show", directory, "--rank", "8")
        assert "step 1 is not here (steps 2 to 5 are)" in said("show", directory, "--step", "1")
        names = [path.name for path in directory.iterdir() if path.name.startswith("step-")]
        assert said("ls", directory).split() == sorted(names) == [f"step-{step:09d}" for step in range(2, 6)]
        assert [step["step"] for step in document("ls", directory)["steps"]] == [2, 3, 4, 5]
        files = sorted(path.name for path in mount.step(2).iterdir())
        assert said("ls", directory, "--step", "2").split() == files
        listed = document("ls", directory, "--step", "2")["steps"][0]["files"]
        assert [each["name"] for each in listed] == files
        assert listed[1]["crc32c"] == listed[0]["crc32c"] != listed[2]["crc32c"]
        assert "step 6 is not here" in said("ls", directory, "--step", "6")
