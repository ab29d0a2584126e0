"""What the stories of the quickstart share: where things are, what was checked, and the table at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import forget_variables, is_mounted, let_go
from quickstart.programs import in_time, processes_naming, refuse_failure, run

DEADLINE_S = 300.0  # to give up on a machine that is too slow, or broken
SERVERS = ("weed", "azurite")  # they run in this directory until the end
BRIEF = "--brief" in sys.argv[1:]  # the same story of less text: for CI, where nobody watches

console = Console(highlight=False)


@dataclass
class Story:
    """Where things are, and what was checked so far."""

    directory: Path
    lake: str
    started: float = field(default_factory=time.monotonic)
    checks: list[tuple[str, str, bool]] = field(default_factory=list)
    producers: list[subprocess.Popen[str]] = field(default_factory=list)
    mounts: list[Path] = field(default_factory=list)

    def say(self, text: str) -> None:
        console.print(f"[dim]{time.monotonic() - self.started:5.1f} s[/dim]  {text}", soft_wrap=True)

    def check(self, what: str, found: str, held: bool) -> None:
        self.checks.append((what, found, held))

    def left_s(self) -> float:
        return max(DEADLINE_S - (time.monotonic() - self.started), 1.0)

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Wait; ends the quickstart if a producer fails or the time is up."""
        while not true():
            for producer in self.producers:
                refuse_failure("a producer", producer)
            if self.left_s() <= 1.0:
                raise SystemExit(f"quickstart: {what} did not come within {DEADLINE_S:.0f} s")
            time.sleep(0.1)

    def finish(self, who: str, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The JSON that a producer ends with."""
        output, _ = in_time(f"the end of {who}", process.communicate, self.left_s())
        refuse_failure(who, process)
        summary: dict[str, Any] = json.loads(output)
        return summary

    def mount(self, running: ExitStack, directory: Path, *options: str, lake: str = "") -> None:
        """`stepfs mount` returns when the mount answers."""
        directory.mkdir()
        self.mounts.append(directory)
        caches = ["--cache-dir", str(self.directory / f"cache-{directory.name}")]
        running.callback(let_go, directory)
        run("stepfs", "mount", lake or self.lake, str(directory), *caches, *options)
        self.say(f"mounted on [bold]{directory}[/bold] {' '.join(options)}")

    def unmount(self, directory: Path, *options: str) -> None:
        run("stepfs", "unmount", str(directory), *options)
        self.say(f"unmounted {directory} {' '.join(options)}".rstrip())

    def check_nothing_left(self) -> None:
        mounts = [path for path in self.mounts if is_mounted(path)]
        caches = list(self.directory.glob("cache-*"))
        programs = [name for name in processes_naming(self.directory) if not any(server in name for server in SERVERS)]
        left = [*map(str, mounts), *map(str, caches), *programs]
        self.check("no mount, process or cache is left", ", ".join(left) or "nothing", not left)

    def report(self) -> int:
        table = Table(title="stepfs quickstart", title_justify="left")
        for heading in ("checked", "found", ""):
            table.add_column(heading)
        for what, found, held in self.checks:
            table.add_row(what, found, "[green]ok[/green]" if held else "[bold red]FAILED[/bold red]")
        console.print(table)
        self.say("done" if all(held for *_, held in self.checks) else "a check failed")
        return 0 if self.checks and all(held for *_, held in self.checks) else 1


@contextmanager
def lake_url(directory: Path) -> Iterator[str]:
    """A place for a lake: a directory; with --store of a server started for the purpose, or the URL that it names."""
    words = sys.argv[1:]
    store = words[words.index("--store") + 1] if "--store" in words else ""
    if not store or "://" in store:
        yield store or (directory / "lake").as_uri()
        return
    import cloudservers  # noqa: PLC0415  (how tests start servers is how they are started)
    import servers  # noqa: PLC0415

    forget_variables("AWS_", "AZURE_", "GOOGLE_")
    server: servers.S3Server | cloudservers.CloudServer
    with ExitStack() as stack:
        if store == "s3":
            server = stack.enter_context(servers.seaweedfs(directory / "server"))
        else:
            start = cloudservers.google if store == "gs" else cloudservers.azurite
            server = stack.enter_context(start(directory / "server"))
        os.environ.update(server.environment())
        yield f"{server.home}/quickstart"


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step-"))


def show(command: list[str]) -> None:
    """A command and what it prints, shortened."""
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    console.print(f"[bold]$ {' '.join(command)}[/bold]")
    shown = listing if len(listing) <= 16 else [*listing[:3], "…", *listing[-3:]]
    console.print("\n".join(shown), markup=False)
