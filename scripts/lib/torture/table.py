"""What a torture run found, as a table for people; `--json` prints the same figures."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from torture.run import COUNTED


def print_table(figures: dict[str, object]) -> None:
    table = Table(title="stepfs torture", title_justify="left")
    table.add_column("what")
    table.add_column("found", justify="right")

    def row(what: str, value: object, *, bad: bool = False) -> None:
        text = f"{value:,}" if isinstance(value, int) else str(value)
        table.add_row(what, f"[bold red]{text}[/bold red]" if bad else text)

    kills = dict(figures["kills"])  # type: ignore[call-overload]
    row("real kills: producers, mounts, reclaimers, server", sum(kills[kind] for kind in COUNTED))
    for kind, count in kills.items():
        row(f"  kill -9 of a {kind}", count)
    for kind, count in dict(figures["frozen"]).items():  # type: ignore[call-overload]
        row(f"  SIGSTOP … SIGCONT of a {kind}", count)
    asked, handed_over = map(int, figures["replaced_mounts"])  # type: ignore[call-overload]
    row("mounts handed over of asked for, others by a kill", f"{handed_over} of {asked}")
    zombies = dict(figures["frozen"])["producer"]  # type: ignore[call-overload]
    fenced = figures["fenced_zombies"]
    row("zombie producers fenced (exit code 7)", f"{fenced} of {zombies}", bad=fenced != zombies)
    for name, count in sorted(dict(figures["proxy"]).items()):  # type: ignore[call-overload]
        row(f"  proxy: {name}", count)
    sampled = ", ".join(f"{count} {how}" for how, count in dict(figures["sampled"]).items())  # type: ignore[call-overload]
    row("files read in no order", sampled)
    attempts = ", ".join(f"{count} {what}" for what, count in dict(figures["attempts"]).items())  # type: ignore[call-overload]
    row("commit attempts of producers", attempts)
    for name in ("steps", "records", "readings", "live_steps_after_reclaim", "probe_objects_left"):
        row(name.replace("_", " "), figures[name])
    for name in ("lost", "duplicated", "torn", "disordered", "readers_differ"):
        row(name.replace("_", " "), figures[name], bad=bool(figures[name]))
    row("under torture / altogether, s", f"{figures['tormented_s']} / {figures['wall_s']}")
    row("everything held", "yes" if figures["held"] else "NO", bad=not figures["held"])
    Console().print(table)
