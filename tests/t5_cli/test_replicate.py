"""`stepfs replicate` as a command: what it makes and prints, and each mistake with its line and exit code."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import forked
import json_schemas
import pytest
import trio
from lakes import SLICES, commit, payloads, stepfs
from produced_text import produce_in_a_process

from stepfs import CheckpointHook, Lake, StepDataset
from stepfs._internal.clock import SystemClock
from stepfs.errors import CorruptError, ReclaimedError, RefusedError, UsageError
from stepfs.lake.identity import open_lake
from stepfs.lake.log.append import seal
from stepfs.lake.log.reader import LogReader
from stepfs.store.local import local_store
from stepfs.store.opening import open_store
from stepfs_producer import Producer


@pytest.fixture
def home(file_url: str) -> str:
    stepfs("init", file_url, "--slices", SLICES)
    commit(file_url, range(6))
    return file_url


@pytest.fixture
def copy(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'copy'}"


def path(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def read(lake: Lake, step: int) -> list[bytes]:
    return [bytes(lake[step][rank]) for rank in range(SLICES)]


def refused(code: int, said: str, *arguments: object) -> None:
    """One line on stderr that says so, and that code."""
    ended = stepfs(*arguments)
    lines = ended.err.strip().splitlines()
    assert (ended.code, len(lines)) == (code, 1), ended.err
    assert said in lines[0]


def replicated(*arguments: object) -> dict[str, object]:
    ended = stepfs("replicate", *arguments, "--json")
    assert ended.code == 0, ended.err
    json_schemas.check("replicate", ended.document)
    return ended.document


def test_it_is_the_same_lake_and_says_of_whom(home, copy):
    first = replicated(home, copy)
    assert (first["home"], first["copy"], first["next_step"], first["copied"]["objects"]) == (home, copy, 6, 6)
    commit(home, range(6, 9))
    second = replicated(home, copy)
    assert (second["next_step"], second["copied"]["objects"]) == (9, 3)
    there, here = (stepfs("status", url, "--json").document for url in (home, copy))
    json_schemas.check("status-lake", here)
    assert (there["replica_of"], here["replica_of"]) == (None, home)
    assert there["digest"] == here["digest"] == second["digest"]
    said = stepfs("status", copy).out
    assert f"copy of   {home}  (a replica)" in said
    assert f"digest    {here['digest']}" in said
    assert stepfs("verify", copy).code == 0
    with Lake(copy, memory="64M") as lake:
        assert read(lake, 8) == payloads(8)
    assert stepfs("replicate", home, copy).out.startswith(f"{copy} has steps 0 to 8 of {home}; copied 0 objects")


def test_an_empty_lake_has_an_empty_replica(file_url, copy):
    stepfs("init", file_url, "--slices", 1)
    assert replicated(file_url, copy)["next_step"] == 0
    assert f"{copy} has no step of {file_url} yet" in stepfs("replicate", file_url, copy).out


def test_it_follows_until_it_is_interrupted(home, copy):
    with forked.Forked("stepfs", "replicate", home, copy, "--every", "20ms", "--json") as program:
        json_schemas.check("replicate", json.loads(program.stdout.readline()))
        commit(home, range(6, 9))
        with Lake(copy, memory="64M", wait="200s") as lake:
            assert read(lake, 8) == payloads(8)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate()
    assert (program.returncode, out, err) == (130, "", "")


def test_an_outage_is_told_once_and_borne(home, copy, tmp_path):
    flag = tmp_path / "away"
    away = partial(forked.fails_while, str(flag), "stepfs.store.local.local_store", "LocalStore", "get")
    with forked.Forked("stepfs", "replicate", home, copy, "--every", "20ms", first=away) as program:
        assert "has steps 0 to 5" in program.stdout.readline()
        for steps in (range(6, 9), range(9, 12)):
            flag.touch()
            assert program.stderr.readline() == "stepfs: the store does not answer; trying again, and a line a minute\n"
            commit(home, steps)
            flag.unlink()
            assert f"has steps 0 to {steps[-1]}" in program.stdout.readline()
        program.send_signal(signal.SIGINT)
        assert program.communicate()[1] == ""


def test_copy_is_no_other_place_than_it_seems(home, copy, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path(home))
    by_link = f"file://{link}"
    refused(4, f"{by_link} is {home} by another name, or a copy that is a lake", "replicate", home, by_link)
    shutil.copytree(path(home), path(copy))
    refused(4, f"{copy} is {home} by another name, or a copy that is a lake", "replicate", home, copy)
    other = f"file://{tmp_path / 'other'}"
    stepfs("init", other, "--slices", 1)
    refused(4, f", and {home} is ", "replicate", home, other)
    assert not (path(home) / "probe").exists()


def test_home_is_a_lake_of_its_own(home, copy):
    refused(3, "is not a lake", "replicate", copy, home)
    replicated(home, copy)
    refused(4, f"{copy} is itself a replica: replicate {home}", "replicate", copy, f"{copy}-2")
    assert not path(f"{copy}-2").exists()


def test_nothing_is_produced_to_a_replica(home, copy, tmp_path):
    replicated(home, copy)
    said = f"{copy} is a replica: produce to {home}; if that is lost for good: stepfs fork {copy} NEW"
    refused(4, said, "seal", copy)
    refused(4, said, "retire-producer", copy, "tok-0")
    with pytest.raises(RefusedError, match="is a replica: produce to"), Producer(copy, producer_id="tok-0"):
        pass
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    before = sorted(path(copy).rglob("*"))
    ended = produce_in_a_process(copy, "--input", tmp_path / "a.txt")
    assert ended.returncode == 4
    assert said in ended.stderr
    assert sorted(path(copy).rglob("*")) == before


def test_a_fork_of_the_replica_goes_on_when_the_lake_is_gone(home, copy, tmp_path):
    replicated(home, copy)
    shutil.rmtree(path(home))
    new = f"file://{tmp_path / 'new'}"
    assert stepfs("fork", copy, new).code == 0
    commit(new, range(6, 8))
    with Lake(new, memory="64M") as lake:
        assert [read(lake, 5), read(lake, 7)] == [payloads(5), payloads(7)]
    refused(3, "is not a lake", "replicate", home, copy)


def test_a_fork_with_steps_of_its_parent_is_told_where_to_begin(home, copy, tmp_path):
    fork = f"file://{tmp_path / 'fork'}"
    stepfs("fork", home, fork, "--skip", "4:5")
    refused(4, "are in " + home + ": begin behind them, with --from 5", "replicate", fork, copy)
    commit(fork, range(6, 8))
    found = replicated(fork, copy, "--from", 5)
    assert (found["first_step"], found["next_step"], found["copied"]["objects"]) == (5, 7, 2)


def test_home_was_restored_from_a_backup(home, copy, tmp_path):
    shutil.copytree(path(home), tmp_path / "backup")
    commit(home, range(6, 9))
    replicated(home, copy)
    shutil.rmtree(path(home))
    shutil.copytree(tmp_path / "backup", path(home))
    refused(4, "it was restored from an earlier time, or somebody wrote into the replica", "replicate", home, copy)
    commit(home, range(6, 12))
    refused(4, f"stepfs fork {copy} NEW", "replicate", home, copy, "--every", "1s")
    assert stepfs("verify", copy).code == 0


def test_home_reclaimed_what_was_not_copied(home, copy):
    replicated(home, copy)
    commit(home, range(6, 9))
    stepfs("checkpoint", home, "--group", "run", "--new-group", 8)
    assert stepfs("reclaim", home, "--grace", "0").code == 0
    refused(4, "were not copied: make a new replica in another place, and delete", "replicate", home, copy)
    assert replicated(home, f"{copy}-2")["first_step"] == 8


def test_somebody_wrote_into_the_log_of_the_replica(home, copy):
    """A stepfs that does not know replicas."""

    async def seals() -> None:
        store = open_store(copy)
        identity = replace(await open_lake(store), replica_of=None)
        assert await seal(await LogReader.open(store, identity), SystemClock())

    replicated(home, copy)
    trio.run(seals)
    refused(4, "or somebody wrote into the replica", "replicate", home, copy)


def test_a_damaged_object_is_named_and_all_before_it_is_there(home, copy):
    objects = sorted(path(home).glob("*/data/*/*"))
    objects[4].write_bytes(objects[4].read_bytes()[:-1])
    refused(5, "step 4: ", "replicate", home, copy)
    replicated(home, f"{copy}-2", "--from", 5)
    sound = objects[5].read_bytes()
    commit(home, range(6, 8))
    late = sorted(path(home).glob("*/data/*/*"))[7]
    late.write_bytes(b"rot")
    refused(5, "step 7: ", "replicate", home, f"{copy}-2")
    assert stepfs("status", f"{copy}-2", "--json").document["next_step"] in {6, 7}
    assert objects[5].read_bytes() == sound


@pytest.mark.parametrize(("number", "code", "said"), [(errno.ENOSPC, 6, "free space"), (errno.EROFS, 4, "read-only")])
def test_a_place_that_is_full_or_read_only(home, copy, monkeypatch, number, code, said):
    def write(*_):
        raise OSError(number, "no space left" if number == errno.ENOSPC else "read-only file system")

    monkeypatch.setattr(local_store, "write_all", write)
    refused(code, said, "replicate", home, copy)


def test_a_first_step_beyond_the_head_is_the_head(home, copy):
    found = replicated(home, copy, "--from", 1000)
    assert (found["first_step"], found["next_step"], found["copied"]["objects"]) == (6, 6, 0)
    commit(home, range(6, 7))
    assert replicated(home, copy)["next_step"] == 7


@pytest.mark.parametrize(
    "options", [["--from", "-1"], ["--every", "0"], ["--every", "often"], ["--memory", "much"], ["--from", "x"]]
)
def test_options_that_mean_nothing(home, copy, options):
    assert stepfs("replicate", home, copy, *options).code == 2
    assert not path(copy).exists()


def test_a_damaged_copy_is_mended_as_verify_says(home, copy):
    replicated(home, copy)
    objects = sorted(path(copy).glob("*/data/*/*"))
    body = bytearray(objects[1].read_bytes())
    body[body.index(payloads(1)[0])] ^= 1
    objects[1].write_bytes(body)
    objects[3].unlink()
    assert replicated(home, copy)["copied"]["objects"] == 0
    said = stepfs("verify", copy)
    first, *others = (line for line in said.err.splitlines() if line.startswith("to do: "))
    assert (said.code, first) == (5, f"to do: first put again what {home} has: stepfs replicate {home} {copy} --check")
    assert "fork" in others[0]
    with Lake(copy, memory="64M") as lake, pytest.raises(CorruptError, match="`stepfs verify` says how to restore it"):
        _ = lake[1][0], lake[1][1]
    assert replicated(home, copy, "--check")["copied"]["objects"] == 2
    assert stepfs("verify", copy).code == 0
    assert replicated(home, copy, "--check")["copied"]["objects"] == 0
    stepfs("verify", home)
    assert [one.read_bytes() for one in objects] == [one.read_bytes() for one in sorted(path(home).glob("*/data/*/*"))]


def test_an_archive_is_one_from_its_making_on(home, copy):
    replicated(home, copy)
    refused(4, f"{copy} was made without --keep-all, and is no archive", "replicate", home, copy, "--keep-all")
    archive = f"{copy}-archive"
    replicated(home, archive, "--keep-all")
    replicated(home, archive)
    assert f"copy of   {home}  (an archive)" in stepfs("status", archive).out
    stepfs("checkpoint", home, "--group", "run", "--new-group", 4)
    for url in (home, archive, copy):
        replicated(home, archive), replicated(home, copy)
        assert stepfs("reclaim", url, "--grace", "0").code == 0
    first = [stepfs("status", url, "--json").document["first_step"] for url in (home, archive, copy)]
    assert first == [4, 0, 4]


def held(url: str) -> dict[str, object]:
    document = stepfs("status", url, "--json").document
    json_schemas.check("status-lake", document)
    return {name: group["held_for"] for name, group in document["groups"].items()}


def test_what_a_copy_holds_says_whose_it_is_and_how_it_ends(home, copy):
    """After one that ended; one that goes on follows the runs there."""
    replicated(home, copy)
    stepfs("checkpoint", copy, "--group", "far", "--new-group", 2)
    said = stepfs("replicate", home, copy).out.splitlines()
    (name,) = held(home)
    assert (name.startswith(":replica/"), held(home)) == (True, {name: copy})
    assert held(copy) == {"far": None, ":home": None}
    assert f"{name} of {copy} " in stepfs("status", home).out
    ends = f"stepfs retire-group {home} {name}"
    assert said[1] == f"until this runs again, {home} keeps what is needed at {copy} now; to end that: {ends}"
    assert stepfs(*ends.split()[1:]).code == 0
    assert held(home) == {}
    stepfs("retire-group", copy, "far")
    assert len(stepfs("replicate", home, copy).out.splitlines()) == 1
    refused(2, f"group '{name}': names with ':'", "checkpoint", home, "--group", name, 3, "--new-group")
    refused(2, "group ':home': names with ':'", "checkpoint", copy, "--group", ":home", 3)
    assert stepfs("retire-group", copy, ":home").code == 0


@pytest.mark.parametrize("name", [":home", ":replica/0123", "a:b", f":fork/{'ab' * 16}"])
def test_no_run_has_a_name_under_which_stepfs_keeps_steps(home, copy, name):
    """At every door, of a lake and of its replica, which it may be read from later."""
    replicated(home, copy)
    other = name.strip(":").replace(":", "-")
    said = f"group {name!r}: names with ':' are those under which stepfs keeps steps for replicas and forks; take {other!r}"
    for url in (home, copy):
        with pytest.raises(UsageError, match=said), Lake(url, group=name, memory="64M"):
            pass
        with pytest.raises(UsageError, match=said):
            _ = StepDataset(url, rank=0, stop=6, group=name)[0]
        with pytest.raises(UsageError, match=said):
            CheckpointHook(url, group=name)
        before = held(url)
        if not name.startswith(":fork/"):  # an operator may hold on to what a fork shares
            refused(2, said, "checkpoint", url, "--group", name, 3, "--new-group")
            refused(2, said, "checkpoint", url, "--group", name, 3, "--resumed")
        assert held(url) == before
        assert stepfs("checkpoint", url, "--group", other, 3, "--new-group").code == 0


def test_a_copy_that_begins_later_says_what_it_has(home, copy):
    replicated(home, copy, "--from", 4)
    with Lake(copy, memory="64M") as lake, pytest.raises(ReclaimedError) as absent:
        _ = lake[2]
    assert str(absent.value) == f"step 2 is not in this replica, which has the steps from 4 on: see {home}"
