"""Producers of text commit, a trainer reads files, one producer is killed, bytes are counted.

Two `stepfs-produce run` processes pack sources of Python's standard library into a new lake, each one shard of them: the
plan that `stepfs-produce text` would run, at a pace that can be watched. `stepfs mount` shows it twice: as it grows, and as
a fixed range of steps for the map-style dataset of `train`, whose reads wait for steps that are not committed yet.
Everything runs as a stranger would run it: commands and files.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sysconfig
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from quickstart.programs import run, start
from quickstart.story import BRIEF, Story, show, steps_in
from quickstart.trainer import Trainer

CORPUS = [f"{sysconfig.get_path('stdlib')}/{name}/*.py" for name in ("asyncio", "http", "json")]
PLAN = """\
version: 1
output: {{ext: .safetensors, mesh: "dp=2", sequence_length: 128, micro_batches: 4}}
sources:
  text: {{format: text, files: {files}, shard: {shard}}}
defaults: {{shuffle: none, epochs: 1}}
pack: concat
balance: none
until: {{last: pad}}
"""
PRODUCERS = 2
STEPS_PER_SECOND = 12  # of each producer: slow enough to watch, and to be killed in the middle
TRAINED_STEPS = 400
KILL_AT_STEP = 250
if BRIEF:
    CORPUS, STEPS_PER_SECOND, TRAINED_STEPS, KILL_AT_STEP = CORPUS[1:], 20, 60, 40


def tell(story: Story, running: ExitStack) -> None:
    run("stepfs", "init", story.lake, "--slices", "2", "--ext", ".safetensors")
    growing, fixed = (story.directory / name for name in ("run", "epoch"))
    story.mount(running, growing)
    story.mount(running, fixed, "--steps", f"0:{TRAINED_STEPS}")
    trainer = Trainer(story, running, fixed, 258, 4, 128)  # bytes, and what the plan says
    story.until("the trainer's first read", trainer.waits)
    story.say("the trainer has started; no step is committed yet, its reads wait")
    story.producers = [start_producer(story, running, index) for index in range(PRODUCERS)]
    story.say(f"{PRODUCERS} producers have started")
    story.until("20 steps", lambda: len(steps_in(growing)) >= 20)
    show(["ls", str(growing)])
    show(["ls", "-l", f"{growing}/latest/"])
    story.until(f"step {KILL_AT_STEP}", lambda: len(steps_in(growing)) > KILL_AT_STEP)
    victim = story.producers[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    killed_at = len(steps_in(growing))
    story.say(f"[bold red]kill -9[/bold red] of producer 0 at step {killed_at}; started again")
    story.producers[0] = start_producer(story, running, 0)
    outputs = [story.finish("a producer", producer) for producer in story.producers]
    produced_at = time.monotonic()
    story.say("both producers have committed everything and are gone")
    trainer.finish()
    check_training(story, trainer, produced_at)
    check_lake(story, growing, outputs, killed_at)
    check_bytes(story, growing)
    story.unmount(fixed)
    story.unmount(growing)


def start_producer(story: Story, running: ExitStack, index: int) -> subprocess.Popen[str]:
    plan, shard = story.directory / f"shard-{index}.yaml", f"{index}/{PRODUCERS}"
    plan.write_text(PLAN.format(files=json.dumps(CORPUS), shard=shard))
    what = [
        "stepfs-produce", "run", str(plan), story.lake, "--producer-id", f"text-{index}", "--workers", "1",
    ]  # fmt: skip
    return start(running, [*what, "--steps-per-second", str(STEPS_PER_SECOND), "--json"])


def check_training(story: Story, trainer: Trainer, produced_at: float) -> None:
    first, last = trainer.losses[0], trainer.losses[-1]
    story.check(f"loss over {TRAINED_STEPS} steps falls", f"{first:.2f} → {last:.2f}", last < 0.7 * first)
    ahead = produced_at - trainer.first_at
    story.check("training began while producers were committing", f"{ahead:.0f} s before the last commit", ahead > 0)


def check_lake(story: Story, growing: Path, outputs: list[dict[str, dict[str, int]]], killed_at: int) -> None:
    status = json.loads(run("stepfs", "status", story.lake, "--json").stdout)
    listed = json.loads(run("stepfs", "ls", story.lake, "--json").stdout)["steps"]
    total = sum(output["total"]["steps"] for output in outputs)
    story.until(f"step {total - 1}", lambda: len(steps_in(growing)) >= total)
    shown = len(steps_in(growing))
    story.check(f"steps committed by {PRODUCERS} producers = steps shown", f"{total} = {shown}", shown == total)
    numbers = [step["step"] for step in listed]
    makers = [step["producer"] for step in listed]
    turns = sum(one != other for one, other in pairwise(makers))
    story.check(
        "one global order, dense, both producers in it",
        f"{turns} changes of producer",
        numbers == [*range(total)],
    )
    epochs = sorted(producer["epoch"] for producer in status["producers"].values())
    story.check(
        "the killed producer came back as a new incarnation",
        f"at step {killed_at}, epochs {epochs}",
        epochs == [1, 2],
    )


def check_bytes(story: Story, growing: Path) -> None:
    from quickstart.audit import audit  # noqa: PLC0415  (numpy)

    story.say("reading every file of every step through the mount")
    result = audit(growing, CORPUS)
    for fault in result.faults[:5]:
        story.say(f"[red]{fault}[/red]")
    found = f"{result.source_bytes:,} bytes in {result.files:,} files"
    story.check("every source byte appeared exactly once", found, not result.faults)
