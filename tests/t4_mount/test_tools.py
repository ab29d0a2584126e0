"""Ordinary tools over a real mount agree with what the producer appended, byte for byte, on both stores."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import stat
import tarfile

import json_schemas
import pytest
from finished import ran
from realmount import lake_with, make_lake, mounted, produce, stepfs

from stepfs import Lake
from stepfs.format.grid import Grid

STEPS, SLICES = 12, 3


def run(*command: str, cwd=None) -> str:
    done = ran(command, cwd=cwd)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    assert not done.stderr, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def expected(lake_url):
    batches = lake_with(lake_url, STEPS, slices=SLICES, size=200_000)
    return {
        f"step-{step:09d}/rank-{index:05d}.bin": data
        for step, batch in enumerate(batches)
        for index, data in enumerate(batch)
    }


def test_tools_see_what_was_appended(lake_url, expected, tmp_path):
    with mounted(lake_url, tmp_path / "m") as mount:
        directories = mount.steps()
        assert directories == sorted({name.partition("/")[0] for name in expected})
        root = str(mount.directory)

        found = run("find", ".", "-path", "./.stepfs", "-prune", "-o", "-type", "f", "-print", cwd=root)
        assert sorted(line.removeprefix("./") for line in found.splitlines()) == sorted(expected)

        listed = run("ls", "-lR", "--time-style=+%s", *directories, cwd=root)
        sizes = [int(line.split()[4]) for line in listed.splitlines() if line.startswith("-r--r--r--")]
        assert sorted(sizes) == sorted(map(len, expected.values()))

        shown = run("stat", "-c", "%n %s %i", *expected, cwd=root).splitlines()
        for line, (name, data) in zip(shown, expected.items(), strict=True):
            found = os.stat(mount.directory / name)
            assert line.split() == [name, str(len(data)), str(found.st_ino)]  # type: ignore[attr-defined]
            assert (found.st_size, stat.S_IMODE(found.st_mode), found.st_nlink) == (len(data), 0o444, 1)  # type: ignore[attr-defined]
            assert found.st_blocks == -(-len(data) // 512)  # type: ignore[attr-defined]
        assert run("du", "-bc", *directories, cwd=root).splitlines()[-1].split()[0] == str(
            sum(map(len, expected.values()))
        )

        sums = run("sha256sum", *sorted(expected), cwd=root)
        digests = {name: digest for digest, name in (line.split("  ") for line in sums.splitlines())}
        assert digests == {name: hashlib.sha256(data).hexdigest() for name, data in expected.items()}

        copy, synced = tmp_path / "copy", tmp_path / "synced"
        copy.mkdir()
        run("cp", "-r", *(f"{root}/{name}" for name in directories), str(copy))
        run("rsync", "-a", *(f"{root}/{name}" for name in directories), f"{synced}/")
        for name in directories:
            run("diff", "-r", f"{root}/{name}", str(copy / name))
            run("diff", "-r", f"{root}/{name}", str(synced / name))
        one = next(iter(expected))
        assert (synced / one).stat().st_mtime == (mount.directory / one).stat().st_mtime

        run("tar", "cf", str(tmp_path / "x.tar"), *directories, cwd=root)
        with tarfile.open(tmp_path / "x.tar") as tar:
            members = {m.name: tar.extractfile(m).read() for m in tar.getmembers() if m.isfile()}
        assert members == expected

        for name, data in expected.items():
            assert (copy / name).read_bytes() == data
        shutil.rmtree(synced, ignore_errors=False, onerror=lambda f, p, _: (os.chmod(os.path.dirname(p), 0o700), f(p)))
        assert mount.status()["faults"] == 0


def test_the_same_files_under_the_same_inodes_after_a_remount_and_on_another_node(file_url, tmp_path):
    lake_with(file_url, 6, slices=3)
    names = [f"step-{step:09d}/rank-{rank:05d}.bin" for step in range(6) for rank in range(3)]

    def inodes(directory):
        return {name: os.stat(directory / name).st_ino for name in names}

    with mounted(file_url, tmp_path / "a") as first, mounted(file_url, tmp_path / "b") as second:
        numbers = inodes(first.directory)
        assert inodes(second.directory) == numbers
        assert numbers["step-000000005/rank-00002.bin"] == 6 << 20 | 3
    with mounted(file_url, tmp_path / "a") as again:
        assert inodes(again.directory) == numbers


CHANGES = {
    "touch": lambda m: (m.directory / "x").touch(), "mkdir": lambda m: (m.directory / "x").mkdir(),
    "append": lambda m: m.file(0, 0).open("ab"), "truncate": lambda m: os.truncate(m.file(0, 0), 0),
    "unlink": lambda m: m.file(0, 0).unlink(), "rmdir": lambda m: m.step(0).rmdir(),
    "rename": lambda m: m.file(0, 0).rename(m.directory / "x"), "chmod": lambda m: m.file(0, 0).chmod(0o777),
    "chown": lambda m: os.chown(m.file(0, 0), 1, 1), "utime": lambda m: os.utime(m.file(0, 0)),
    "symlink": lambda m: (m.directory / "x").symlink_to("y"),
    "link": lambda m: (m.directory / "x").hardlink_to(m.file(0, 0)), "mkfifo": lambda m: os.mkfifo(m.directory / "x"),
    "setxattr": lambda m: os.setxattr(m.file(0, 0), "user.x", b"y"),
}  # fmt: skip


def test_every_change_is_refused_and_special_facts_are_not_there(file_url, tmp_path):
    lake_with(file_url, 1)
    with mounted(file_url, tmp_path / "m") as mount:
        for name, change in CHANGES.items():
            with pytest.raises(OSError, match="Read-only file system") as caught:
                change(mount)
            assert caught.value.errno == 30, name
        with pytest.raises(OSError, match="not supported"):
            os.listxattr(mount.step(0))
        with pytest.raises(OSError, match="not supported"):
            os.getxattr(mount.file(0, 0), "user.x")
        options = run("findmnt", "-no", "OPTIONS,FSTYPE,SOURCE", str(mount.directory)).split()
        assert {"ro", "nosuid", "nodev", "noexec"} <= set(options[0].split(","))
        assert options[1:] == ["fuse.stepfs", file_url]


def test_ranks_of_a_world_are_hard_links(file_url, tmp_path):
    make_lake(file_url, slices=2)
    batches = produce(file_url, 2)
    with mounted(file_url, tmp_path / "m", "--world", "8") as mount:
        files = sorted(mount.step(1).iterdir())
        assert [f.name for f in files] == [f"rank-{rank:05d}.bin" for rank in range(8)]
        assert [f.read_bytes() for f in files] == [batches[1][rank // 4] for rank in range(8)]
        assert {f.stat().st_nlink for f in files} == {4}
        assert len({f.stat().st_ino for f in files}) == 2
        assert int(run("du", "-bs", str(mount.step(1))).split()[0]) == sum(map(len, batches[1]))
        assert mount.status()["data"]["misses"] <= 2  # one fetch per slice, not per rank
    with mounted(file_url, tmp_path / "m", "--mesh", "dp=2,tp=2") as mount:
        assert [mount.file(0, r).read_bytes() for r in range(4)] == [batches[0][r // 2] for r in range(4)]


def test_context_parallel_ranks_are_peers_unless_the_lake_is_cut_for_them(file_url, tmp_path):
    make_lake(file_url)
    make_lake(cut := f"{file_url}-cut", slices=Grid(1, cp=2))
    for url, reads in ((file_url, [0, 0, 1, 1]), (cut, [0, 1])):
        batches = produce(url, 1)
        with mounted(url, tmp_path / "m", "--mesh", f"dp={len(reads) // 2},cp=2") as mount:
            assert [f.read_bytes() for f in sorted(mount.step(0).iterdir())] == [batches[0][i] for i in reads]
            assert {f.stat().st_nlink for f in mount.step(0).iterdir()} == {reads.count(0)}
            grid = {"ranks": len(reads) // 2, "micro": 1, "cp": 1 + (url == cut), "files": [""]}
            config = json.loads((mount.directory / ".stepfs/config.json").read_bytes())
            assert mount.status()["grid"] == config["grid"] == grid
            json_schemas.check("status-mount", mount.status())
            json_schemas.check("config", config)


def test_a_walk_reads_each_step_once_beside_latest(file_url, tmp_path):
    lake_with(file_url, 5)
    with mounted(file_url, tmp_path / "m") as mount:
        assert os.readlink(mount.directory / "latest") == "step-000000004"
        files = glob.glob("**/rank-*", root_dir=mount.directory, recursive=True)
        assert {os.path.dirname(file) for file in files} == set(mount.steps()), "a walk reads each step once"
        assert os.listdir(mount.directory / "latest") == os.listdir(mount.step(4))
        assert "latest" not in os.listdir(mount.directory)


def test_ls_and_verify_take_a_mount(lake, tmp_path):
    with mounted(lake, tmp_path / "m") as mount:
        for command in (["ls"], ["ls", "--json"], ["ls", "--step", "1", "--json"], ["verify"]):
            of_lake = stepfs(*command, lake)
            of_mount = stepfs(*command, mount.directory)
            assert (of_mount.returncode, of_mount.stdout) == (0, of_lake.stdout), of_mount.stderr
            assert of_lake.stdout


def test_a_lake_below_a_hive_like_prefix_lives_a_whole_life(lake_url, tmp_path):
    url, root = f"{lake_url}/dt=2026-11-01/run 1+größe~日本", tmp_path / "m"
    batches = lake_with(url, STEPS, size=200_000)
    options = ["--group", "run", "--no-prime"]
    with mounted(url, root, *options) as mount:
        for step, batch in enumerate(batches):
            for rank, data in enumerate(batch):
                assert (root / f"step-{step:09d}/rank-{rank:05d}.bin").read_bytes() == data
        assert json.loads((root / ".stepfs/status.json").read_text())["lake"] == url
        replaced = stepfs("mount", url, root, *options, "--replace")
        assert replaced.returncode == 0, replaced.stderr
        mount.pid = int(json.loads((root / ".stepfs/config.json").read_text())["pid"])
        assert stepfs("checkpoint", root, str(STEPS - 2), "--group", "run").returncode == 0
        assert stepfs("status", root).returncode == 0
    reclaimed = stepfs("reclaim", url, "--grace", "0s")
    assert reclaimed.returncode == 0, reclaimed.stderr
    copy = f"{lake_url}-copy/{'ü' * 9} 2"
    for words in (
        ["verify", url],
        ["replicate", url, copy],
        ["verify", copy],
        ["fork", copy, f"{copy}f"],
        ["verify", f"{copy}f"],
    ):
        done = stepfs(*words)
        assert done.returncode == 0, done.stderr
    with Lake(copy) as lake, Lake(f"{copy}f") as fork:
        assert [[bytes(lake[step][rank]) for rank in range(2)] for step in range(STEPS - 2, STEPS)] == batches[-2:]
        assert [bytes(fork[STEPS - 2][rank]) for rank in range(2)] == batches[-2]
