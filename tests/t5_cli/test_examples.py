"""The training programs of `scripts/examples`, killed with -9 in the middle; the guide's blocks start the same programs."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import runpy
import signal
import sys
from pathlib import Path

import pytest
import servers
from lakes import stepfs
from realmount import make_lake, mounted, until

from stepfs_producer import Producer

EXAMPLES = Path(__file__).resolve().parents[2] / "scripts/examples"
LINES_MAX = 80
PROGRAMS = sorted(path for path in EXAMPLES.iterdir() if path.suffix in {".py", ".sh"})
STEPS, SLICES = 12, 2
CALM = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
PUBLIC = {"stepfs", "stepfs.torch", "stepfs_producer"}
# Their imports take 3 and 5 s of CPU: each program is forked from a process that has done them.
LOADED = [
    "stepfs.training", "torch.distributed.checkpoint.state_dict", "torch.nn.parallel", "transformers.trainer",
]  # fmt: skip
FORKED = multiprocessing.get_context("forkserver")


def run(words, output, env):
    """In a process of its own: what `python PROGRAM ARGUMENT…` does."""
    with output.open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.environ.update(env)
    sys.argv = [*map(str, words)]
    runpy.run_path(sys.argv[0], run_name="__main__")


def started(*words, output, env=CALM):
    FORKED.set_forkserver_preload(LOADED)
    program = FORKED.Process(target=run, args=(words, output, env))
    program.start()
    return program


def ended(program):
    program.join(100)
    return program.exitcode


def commit(url, steps):
    """Batches as `stepfs-produce text` makes them, as far as the examples read them."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save  # noqa: PLC0415

    with Producer(url, producer_id="p0") as producer:
        for step in steps:
            ids = [(torch.arange(256).view(4, 64) * (step + 1) + index) % 256 for index in range(SLICES)]
            batches = [{"input_ids": i, "labels": i.roll(-1, 1), "doc_ids": torch.zeros_like(i)} for i in ids]
            producer.append([save(batch) for batch in batches], position=step)


@pytest.fixture
def lake(file_url):
    make_lake(file_url, slices=SLICES, ext=".safetensors")
    return file_url


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it_and_what_it_prints(program):
    text = program.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    said = ast.get_docstring(ast.parse(text)) if program.suffix == ".py" else text[: text.index("\nset -euo")]
    assert re.search(rf"\n.*{program.name} ", said), "how it is run"
    assert re.search(r"[Pp]rint|yields", said), "what comes out"
    imported = re.findall(r"^from (stepfs\S*) import (.*)$", text, re.MULTILINE)
    assert {module for module, _ in imported} <= PUBLIC
    assert not [name for _, names in imported for name in names.split(", ") if name.startswith("_")]


@pytest.mark.nightly
def test_the_hugging_face_trainer_opens_the_steps_behind_its_checkpoint_and_no_others(lake, tmp_path):
    commit(lake, range(10))
    checkpoints, before, after = tmp_path / "out", tmp_path / "before", tmp_path / "after"
    checkpoints.mkdir()
    options = ["--steps", f"0:{STEPS}", "--group", "hf", "--checkpoint-dir", str(checkpoints)]
    with mounted(lake, tmp_path / "m", *options) as mount:
        command = [EXAMPLES / "train_huggingface.py", mount.directory, checkpoints]
        first = started(*command, output=before)
        until(lambda: "opens step-000000010" in shown(before), lambda: shown(before))
        first.kill()
        assert ended(first) == -signal.SIGKILL
        until(lambda: mount.status()["need"] == 4, "checkpoints 4 and 8 are not recorded")
        commit(lake, range(10, STEPS))
        assert ended(started(*command, output=after)) == 0, shown(after)
        assert re.findall(r"opens (.*)", shown(after)) == [
            f"step-{step:09d}/rank-{rank:05d}.safetensors" for step in range(8, STEPS) for rank in range(SLICES)
        ]
        again = [line for line in shown(before).splitlines() if "'epoch': '0.75'" in line]  # step 8, trained twice
        assert again
        assert again == [line for line in shown(after).splitlines() if "'epoch': '0.75'" in line]
        until(lambda: mount.status()["need"] == 8, "checkpoint 12 is not recorded")


@pytest.mark.nightly
def test_a_killed_ddp_job_goes_on_with_the_losses_of_an_undisturbed_one(lake, tmp_path):
    commit(lake, range(7))
    checkpoints, before, after, calm = (tmp_path / name for name in ("kept", "before", "after", "calm"))

    def start(directory, kept, output):
        [port] = servers.free_ports(1)
        job = {**CALM, "WORLD_SIZE": str(SLICES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [EXAMPLES / "train_ddp.py", directory, kept, STEPS]
        return [
            started(*command, output=output, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(SLICES)
        ]

    with (
        mounted(lake, tmp_path / "m", "--group", "g", "--wait", "100") as mount,
        mounted(lake, tmp_path / "other", "--group", "calm", "--wait", "100") as other,
    ):
        undisturbed = start(other.directory, tmp_path / "other-kept", calm)
        killed = start(mount.directory, checkpoints, before)
        until(lambda: "step 6 " in shown(before), lambda: shown(before))
        for end in (signal.SIGSTOP, signal.SIGKILL):  # at once: a rank whose peer has died ends by itself
            for rank in killed:
                os.kill(rank.pid, end)
        assert [ended(rank) for rank in killed] == [-signal.SIGKILL] * SLICES
        (checkpoints / "step-000000006").mkdir()  # as if it had been killed while it saved
        commit(lake, range(7, STEPS))
        resumed = start(mount.directory, checkpoints, after)
        assert [ended(rank) for rank in (*resumed, *undisturbed)] == [0] * 4, shown(after) + shown(calm)
        assert list(losses(before)) == list(range(7))
        assert list(losses(after)) == list(range(4, STEPS))
        assert losses(before) | losses(after) == losses(calm)
        assert {step: losses(before)[step] for step in range(4, 7)}.items() <= losses(after).items()
        assert sorted(path.parent.name for path in checkpoints.glob("*/.metadata")) == [
            "step-000000008",
            "step-000000012",
        ]
        until(lambda: mount.status()["need"] == 8, "the checkpoints are not recorded")


@pytest.mark.nightly
def test_rollouts_survive_a_kill_of_each_side_and_are_replayed_to_the_last_digit(file_url, tmp_path):
    make_lake(file_url, slices=1, ext=".pt")
    program, directory, outputs = EXAMPLES / "rollouts.py", tmp_path / "rl", [tmp_path / str(i) for i in range(5)]

    def start(what, number, where=directory):
        return started(program, what, file_url, where, STEPS, output=outputs[number])

    def at(step):
        return lambda: stepfs("status", file_url, "--json").document["paces"].get("trainer", 0) >= step

    collector, trainer = start("collect", 0), start("train", 1)
    until(at(3), lambda: shown(outputs[1]))
    collector.kill()
    assert ended(collector) == -signal.SIGKILL
    collector = start("collect", 2)
    until(at(6), lambda: shown(outputs[2]))
    trainer.kill()
    assert ended(trainer) == -signal.SIGKILL
    trainer = start("train", 3)
    assert [ended(trainer), ended(collector)] == [0, 0], [shown(one) for one in outputs]
    assert ended(start("replay", 4, tmp_path / "again")) == 0
    assert shown(outputs[4]) == shown(outputs[3])
    assert re.fullmatch(rf"{STEPS} steps, weights 0x1\.\w+p\+?\d+\n", shown(outputs[3]))


def losses(output):
    """Step → loss, with all its digits."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)$", shown(output), re.MULTILINE)}


def shown(output):
    return output.read_text() if output.exists() else ""
