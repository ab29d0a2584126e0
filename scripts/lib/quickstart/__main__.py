"""The story behind scripts/quickstart: producers commit, a trainer reads files, a producer is killed, bytes are counted.

Two `stepfs-produce text` processes pack sources of Python's standard library into a new lake. `stepfs mount` shows
it twice: as it grows, and as a fixed range of steps for the map-style dataset of `train`, whose reads
wait for steps that are not committed yet. Everything runs as a stranger would run it: commands and files.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from quickstart.programs import in_time, is_mounted, let_go, processes_naming, refuse_failure, run, start

CORPUS = [Path(sysconfig.get_path("stdlib")) / name for name in ("asyncio", "http", "json")]
SLICES = "2"
SHAPE = ["--batch-size", "4", "--seq-len", "128"]
PRODUCERS = 2
STEPS_PER_SECOND = 12  # of each producer: slow enough to watch, and to be killed in the middle
TRAINED_STEPS = 400
KILL_AT_STEP = 250
if "--brief" in sys.argv[1:]:  # the same story of less text: for CI, where nobody watches
    CORPUS, STEPS_PER_SECOND, TRAINED_STEPS, KILL_AT_STEP = CORPUS[1:], 15, 120, 80
DEADLINE_S = 300.0  # to give up on a machine that is too slow, or broken

console = Console(highlight=False)


@dataclass
class Story:
    """Where things are, and what was checked so far."""

    directory: Path
    lake: str
    started: float = field(default_factory=time.monotonic)
    checks: list[tuple[str, str, bool]] = field(default_factory=list)
    producers: list[subprocess.Popen[str]] = field(default_factory=list)
    killed_at: int = 0  # steps committed by then

    @property
    def growing(self) -> Path:
        return self.directory / "run"

    @property
    def fixed(self) -> Path:
        return self.directory / "epoch"

    def say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self.started:5.1f} s[/dim]  {text}", soft_wrap=True)

    def check(self, what: str, found: str, held: bool) -> None:
        self.checks.append((what, found, held))

    def left_s(self) -> float:
        return max(DEADLINE_S - (time.monotonic() - self.started), 1.0)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    with tempfile.TemporaryDirectory(prefix="stepfs-quickstart-") as name, ExitStack() as stack:
        directory = Path(name)
        story = Story(directory, stack.enter_context(lake_url(directory)))
        story.say(f"lake [bold]{story.lake}[/bold]")
        with ExitStack() as running:
            tell(story, running)
        check_nothing_left(story)
    return report(story)


def interrupted(_number: int, _frame: FrameType | None) -> None:
    """Once: what is cleaned up after it must not be interrupted again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def tell(story: Story, running: ExitStack) -> None:
    run("stepfs", "init", story.lake, "--slices", SLICES)
    mount(story, running, story.growing)
    mount(story, running, story.fixed, "--steps", f"0:{TRAINED_STEPS}")
    trainer = Trainer(story, running)
    until(story, "the trainer's first read", trainer.waits)
    story.say("the trainer has started; no step is committed yet, its reads wait")
    story.producers = [start_producer(story, running, index) for index in range(PRODUCERS)]
    story.say(f"{PRODUCERS} producers have started")
    until(story, "20 steps", lambda: len(steps_in(story.growing)) >= 20)
    show_listing(story)
    until(story, f"step {KILL_AT_STEP}", lambda: len(steps_in(story.growing)) > KILL_AT_STEP)
    victim = story.producers[0]
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    story.killed_at = len(steps_in(story.growing))
    story.say(f"[bold red]kill -9[/bold red] of producer 0 at step {story.killed_at}; started again")
    story.producers[0] = start_producer(story, running, 0)
    outputs = [finish(story, producer) for producer in story.producers]
    produced_at = time.monotonic()
    story.say("both producers have committed everything and are gone")
    trainer.finish()
    check_training(story, trainer, produced_at)
    check_lake(story, outputs)
    check_bytes(story)
    unmount(story, story.fixed)
    unmount(story, story.growing)


@contextmanager
def lake_url(directory: Path) -> Iterator[str]:
    """A place for a lake: a directory, or with --s3 a bucket of a SeaweedFS started for the purpose."""
    if "--s3" not in sys.argv[1:]:
        yield (directory / "lake").as_uri()
        return
    import servers  # noqa: PLC0415  (how tests start SeaweedFS is how it is started)

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    with servers.seaweedfs(directory / "seaweedfs") as server:
        os.environ.update(server.environment())
        yield f"s3://{servers.BUCKET}/quickstart"


def start_producer(story: Story, running: ExitStack, index: int) -> subprocess.Popen[str]:
    inputs = [word for path in CORPUS for word in ("--input", str(path))]
    what = ["stepfs-produce", "text", story.lake, *inputs, *SHAPE, "--shard", f"{index}/{PRODUCERS}"]
    return start(running, [*what, "--steps-per-second", str(STEPS_PER_SECOND), "--json"])


def finish(story: Story, process: subprocess.Popen[str]) -> dict[str, dict[str, int]]:
    """The JSON a producer ends with."""
    output, _ = in_time("the end of a producer", process.communicate, story.left_s())
    refuse_failure("a producer", process)
    summary: dict[str, dict[str, int]] = json.loads(output)
    return summary


def mount(story: Story, running: ExitStack, directory: Path, *options: str) -> None:
    """`stepfs mount` returns when the mount answers."""
    directory.mkdir()
    caches = ["--cache-dir", str(story.directory / f"cache-{directory.name}")]
    running.callback(let_go, directory)
    run("stepfs", "mount", story.lake, str(directory), *caches, *options)
    story.say(f"mounted on [bold]{directory}[/bold] {' '.join(options)}")


def unmount(story: Story, directory: Path) -> None:
    run("stepfs", "unmount", str(directory))
    story.say(f"unmounted {directory}")


def until(story: Story, what: str, true: Callable[[], bool]) -> None:
    while not true():
        for producer in story.producers:
            refuse_failure("a producer", producer)
        if story.left_s() <= 1.0:
            raise SystemExit(f"quickstart: {what} did not come within {DEADLINE_S:.0f} s")
        time.sleep(0.1)


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step-"))


def show_listing(story: Story) -> None:
    newest = story.growing / "latest"
    for command in (["ls", str(story.growing)], ["ls", "-l", f"{newest}/"]):
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        console.print(f"[bold]$ {' '.join(command)}[/bold]")
        shown = listing if len(listing) <= 8 else [*listing[:3], "…", *listing[-3:]]
        console.print("\n".join(shown), markup=False)


class Trainer:
    """`train` at work; its lines are shown as they come."""

    def __init__(self, story: Story, running: ExitStack) -> None:
        self.losses: list[float] = []
        self.first_at = self.last_at = 0.0
        self._story = story
        self._process = start(running, ["python", "-m", "quickstart.train", str(story.fixed)])
        self._lines = threading.Thread(target=self._show, daemon=True)
        self._lines.start()

    def waits(self) -> bool:
        """Whether it has opened a step that is not committed yet."""
        refuse_failure("the trainer", self._process)
        status = json.loads((self._story.fixed / ".stepfs/status.json").read_text())
        return bool(status["waiting"])

    def finish(self) -> None:
        in_time("the end of the trainer", self._process.wait, self._story.left_s())
        self._lines.join()
        refuse_failure("the trainer", self._process)

    def _show(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"loss ([0-9.]+)", line):
                self.last_at = time.monotonic()
                self.first_at = self.first_at or self.last_at
                self.losses.append(float(found[1]))
            self._story.say(f"trainer  {line.rstrip()}")


def check_training(story: Story, trainer: Trainer, produced_at: float) -> None:
    first, last = trainer.losses[0], trainer.losses[-1]
    story.check(f"loss over {TRAINED_STEPS} steps falls", f"{first:.2f} → {last:.2f}", last < 0.7 * first)
    ahead = produced_at - trainer.first_at
    story.check(
        "training began while producers were committing", f"{ahead:.0f} s before the last commit", ahead > 0
    )


def check_lake(story: Story, outputs: list[dict[str, dict[str, int]]]) -> None:
    status = json.loads(run("stepfs", "status", story.lake, "--json").stdout)
    listed = json.loads(run("stepfs", "ls", story.lake, "--json").stdout)["steps"]
    total = sum(output["total"]["steps"] for output in outputs)
    until(story, f"step {total - 1}", lambda: len(steps_in(story.growing)) >= total)
    shown = len(steps_in(story.growing))
    story.check(
        f"steps committed by {PRODUCERS} producers = steps shown", f"{total} = {shown}", shown == total
    )
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
        f"at step {story.killed_at}, epochs {epochs}",
        epochs == [1, 2],
    )


def check_bytes(story: Story) -> None:
    from quickstart.audit import audit  # noqa: PLC0415  (torch takes seconds to import)

    story.say("reading every file of every step through the mount")
    result = audit(story.growing, CORPUS)
    for fault in result.faults[:5]:
        story.say(f"[red]{fault}[/red]")
    found = f"{result.source_bytes:,} bytes of {result.documents} documents in {result.files:,} files"
    story.check("every source byte appeared exactly once", found, not result.faults)


def check_nothing_left(story: Story) -> None:
    mounts = [path for path in (story.growing, story.fixed) if is_mounted(path)]
    caches = list(story.directory.glob("cache-*"))
    programs = [name for name in processes_naming(story.directory) if "weed" not in name]
    left = [*map(str, mounts), *map(str, caches), *programs]
    story.check("no mount, process or cache is left", ", ".join(left) or "nothing", not left)


def report(story: Story) -> int:
    table = Table(title="stepfs quickstart", title_justify="left")
    for heading in ("checked", "found", ""):
        table.add_column(heading)
    for what, found, held in story.checks:
        table.add_row(what, found, "[green]ok[/green]" if held else "[bold red]FAILED[/bold red]")
    console.print(table)
    story.say("done" if all(held for *_, held in story.checks) else "a check failed")
    return 0 if story.checks and all(held for *_, held in story.checks) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        console.print("quickstart: interrupted; everything it started is stopped and removed")
        sys.exit(130)
