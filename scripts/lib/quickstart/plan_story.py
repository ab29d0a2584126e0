"""A plan over code and prose becomes steps, is killed with -9 in the middle, and goes on; every document is counted.

The plan has a tokenizer of its own, as a model would bring it. The mount comes first; the trainer's reads wait. It checks
every rank's batch. Shares, fill and balance must be those that `stepfs-produce simulate` said before.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from bench.machine import stat_of
from quickstart.corpus import EOS, PAD, VOCABULARY, train_tokenizer, write_corpus
from quickstart.programs import run, start
from quickstart.story import BRIEF, Story, console, steps_in
from quickstart.trainer import Trainer

STEPS, KILL_AT_STEP, STEPS_PER_SECOND, SERVICES = 160, 80, 6, "s[a-s]*"
if BRIEF:
    STEPS, KILL_AT_STEP, STEPS_PER_SECOND, SERVICES = 40, 15, 8, "s[e-n]*"
RANKS, MICRO_BATCHES, TOKENS = 4, 2, 512

PLAN = f"""\
version: 1
output:
  ext: .safetensors
  mesh: "dp={RANKS}"
  sequence_length: 256
  micro_batches: {MICRO_BATCHES}
  micro_batch_tokens: {TOKENS}
tokenizer: {{kind: huggingface, file: tokenizer.json, eos: "{EOS}", pad: "{PAD}"}}
sources:
  code:  {{format: jsonl, files: code.jsonl}}
  prose: {{format: jsonl, files: prose.jsonl}}
mix: {{code: 30, prose: 70}}
defaults: {{epochs: 1}}
until: {{steps: {STEPS}}}
"""


def tell(story: Story, running: ExitStack) -> None:
    plan = story.directory / "plan.yaml"
    write_corpus(story.directory, services=SERVICES)
    train_tokenizer(story.directory)
    plan.write_text(PLAN)
    story.say(f"code.jsonl, prose.jsonl, tokenizer.json of {VOCABULARY} tokens, and a plan:")
    console.print(PLAN, markup=False, soft_wrap=True)
    show_output("check", str(plan))
    simulated = json.loads(run("stepfs-produce", "simulate", str(plan), "--limit-steps", str(STEPS), "--json").stdout)
    story.say(f"simulated {STEPS} steps")
    run("stepfs", "init", story.lake, "--slices", str(RANKS), "--ext", ".safetensors")
    mount = story.directory / "planned"
    story.mount(running, mount, "--steps", f"0:{STEPS}", "--group", "quickstart")
    trainer = Trainer(story, running, mount, VOCABULARY, MICRO_BATCHES, TOKENS)
    story.until("the trainer's first read", trainer.waits)
    story.say("the trainer has started; no step is committed yet, its reads wait")
    story.producers = [start_run(story, running, plan)]
    story.until(f"step {KILL_AT_STEP}", lambda: frontier(mount) >= KILL_AT_STEP)
    killed_at = kill(story)
    story.producers = [start_run(story, running, plan)]
    ended = story.finish("the run", story.producers[0])
    story.say("the plan is complete, everything is committed")
    trainer.finish()
    check_training(story, trainer)
    check_plan(story, simulated, ended, killed_at)
    check_documents(story, mount, simulated)
    story.unmount(mount, "--checkpoint", str(STEPS))
    check_checkpoint(story)


def show_output(*command: str) -> None:
    console.print(f"[bold]$ stepfs-produce {' '.join(command)}[/bold]")
    console.print(run("stepfs-produce", *command).stdout.rstrip(), markup=False, soft_wrap=True)


def start_run(story: Story, running: ExitStack, plan: Path) -> subprocess.Popen[str]:
    options = ["--workers", "1", "--steps-per-second", str(STEPS_PER_SECOND), "--json"]
    process = start(running, ["stepfs-produce", "run", str(plan), story.lake, *options])
    story.say("stepfs-produce run has started")
    return process


def kill(story: Story) -> int:
    """Kill -9 of the command alone: its workers must end by themselves. The step at which it was."""
    victim = story.producers.pop()
    workers = len(in_session(victim.pid)) - 1
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    begun = time.monotonic()
    story.until("the end of its workers", lambda: not in_session(victim.pid))
    gone_s = time.monotonic() - begun
    state = status(story)
    story.say(f"[bold red]kill -9[/bold red] of the run at step {state['next_step']}; started again")
    story.check("no worker outlives a killed run", f"{workers} gone after {gone_s:.1f} s", workers > 0)
    return int(state["next_step"])


def in_session(leader: int) -> list[int]:
    """Processes that the command started, and their like."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # no process, or gone meanwhile
            state, _, _, session = stat_of(entry)[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def status(story: Story) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run("stepfs", "status", story.lake, "--json").stdout)
    return document


def frontier(mount: Path) -> int:
    return int(json.loads((mount / ".stepfs/status.json").read_text())["frontier"])


def check_training(story: Story, trainer: Trainer) -> None:
    first, last = trainer.losses[0], trainer.losses[-1]
    story.check(f"loss over {STEPS} steps falls", f"{first:.2f} → {last:.2f}", last < first - 1)
    said = trainer.lines[-1]
    story.check(
        "every rank's batch has its shapes and its cu_seqlens",
        said,
        said.startswith(f"{STEPS * RANKS} batches"),
    )


def check_plan(story: Story, simulated: dict[str, Any], ended: dict[str, Any], killed_at: int) -> None:
    """The lake holds what was simulated, although it was killed in between."""
    known = status(story)
    producer = known["producers"]["plan"]
    story.check(
        "the killed run came back as a new incarnation",
        f"at step {killed_at}, epoch {producer['epoch']}",
        producer["epoch"] == 2 and 0 < killed_at < STEPS,
    )
    story.check(
        "the plan's steps are in the lake, each once",
        f"{known['next_step']} of {STEPS}",
        known["next_step"] == producer["next_seq"] == producer["plan"]["step"] == STEPS,
    )
    shares = {name: (one["tokens"], one["records"]) for name, one in producer["plan"]["sources"].items()}
    said = {name: (one["tokens"], one["records"]) for name, one in simulated["sources"].items()}
    text = ", ".join(f"{name} {one['share']:.2%}" for name, one in producer["plan"]["sources"].items())
    story.check("the shares are the simulated ones", text, shares == said)
    story.check(
        "the whole is as large as simulated",
        f"{ended['total']['tokens']:,} tokens, fill {simulated['fill']:.3f}, slowest ÷ mean {simulated['slowest_to_mean']:.3f}",
        ended["total"]["tokens"] == simulated["tokens"],
    )


def check_documents(story: Story, mount: Path, simulated: dict[str, Any]) -> None:
    from quickstart.audit_plan import audit_plan  # noqa: PLC0415  (tokenizers take a while to import)

    story.say("reading every file of every step through the mount")
    result = audit_plan(mount, story.directory)
    for fault in result.faults[:5]:
        story.say(f"[red]{fault}[/red]")
    taken = {name: one["records"] for name, one in simulated["sources"].items()}
    found = f"{result.documents.total():,} documents, {result.tokens:,} tokens in {result.files:,} files"
    held = not result.faults and dict(result.documents) == taken and len(steps_in(mount)) == STEPS
    story.check("every document is there exactly once, token by token", found, held)


def check_checkpoint(story: Story) -> None:
    group = status(story)["groups"]["quickstart"]
    story.check("the checkpoint is in the lake", f"resumes at step {group['need']}", group["need"] == STEPS)
