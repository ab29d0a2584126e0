"""`bench_train --peers`: one training job on stepfs and on its common alternatives, behind one slowed store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.bed import Bed, Plan
from bench.environments import NotInstalledError, environment
from bench.report import Report, load, show
from bench.slowed import SlowedStore, slowed
from bench_train.peers.catalogue import CATALOGUE, Peer
from bench_train.peers.job import IMAGES, TEXT, Data
from bench_train.peers.judgement import Result
from bench_train.peers.measure import Measurement, Size
from bench_train.peers.nodes import Nodes
from bench_train.peers.samples import TOKENS, make_corpus
from bench_train.peers.table import cells, markdown, table, verdicts

BYTES_PER_S = 100e6
LATENCY_S = 0.02
TEXT_SHARE = 0.8  # of the bandwidth, that the trainer's appetite for text takes
IMAGES_PER_S = 400.0
_TEXT_BATCH = 128
_IMAGE_BATCH = 32


@dataclass(frozen=True, slots=True)
class Options:
    """Of the command."""

    peers: tuple[str, ...]
    kinds: tuple[str, ...]
    quick: bool
    rounds: int
    out: Path


def sizes(*, quick: bool, rounds: int) -> dict[str, Size]:
    if quick:
        return {
            TEXT: Size(batches=20, batch=4, compute_s=0.005, beginning=4, rounds=rounds),
            IMAGES: Size(batches=20, batch=4, compute_s=0.01, beginning=4, rounds=rounds),
        }
    text_s = _TEXT_BATCH * 4 * TOKENS / (TEXT_SHARE * BYTES_PER_S)
    return {
        TEXT: Size(batches=240, batch=_TEXT_BATCH, compute_s=text_s, rounds=rounds),
        IMAGES: Size(batches=120, batch=_IMAGE_BATCH, compute_s=_IMAGE_BATCH / IMAGES_PER_S, rounds=rounds),
    }


def main(options: Options) -> None:
    report = Report("bench_train_peers", "One training job, beside what people use today")
    results: list[Result] = []
    with ExitStack() as stack:
        bed = Bed(report, Plan.quick(), stack)
        store = stack.enter_context(slowed(bed.server.endpoint_url, BYTES_PER_S, LATENCY_S))
        nodes = Nodes(bed)
        for kind in options.kinds:
            size = sizes(quick=options.quick, rounds=options.rounds)[kind]
            data = Data(kind, str(bed.fresh(kind)), size.batches, size.batch)
            make_corpus(data)
            report.figures[f"job, {kind}"] = asdict(size)
            for name in (name for name in options.peers if kind in CATALOGUE[name].kinds):
                report.say(f"[bold]{kind}, {name}[/bold] (load {load()})")
                result = measured(bed, nodes, store, CATALOGUE[name], data, size)
                results.append(result)
                report.say("  ".join(cells(result)))
    finish(report, results, options)


def measured(bed: Bed, nodes: Nodes, store: SlowedStore, peer: Peer, data: Data, size: Size) -> Result:
    """A peer that cannot be had is a row with the reason."""
    try:
        python = Path(sys.executable)
        if peer.requirements:
            python = environment(peer.name.partition("-")[0], peer.requirements, bed.report.say) / "python"
        measurement = Measurement(bed, nodes, store, peer, data, size, python)
        measurement.result.versions = versions(python, peer)
        measurement.run()
    except NotInstalledError as error:
        return Result(peer.name, data.kind, ours=peer.ours, trouble=f"skipped: {error}")
    return measurement.result


def versions(python: Path, peer: Peer) -> str:
    """Of what is measured, and of torch."""
    names = [requirement.partition("==")[0] for requirement in peer.requirements] or ["stepfs"] * peer.ours
    names.append("torch")
    code = f"from importlib.metadata import version as v; print(', '.join(f'{{n}} {{v(n)}}' for n in {names!r}))"
    done = subprocess.run([str(python), "-c", code], check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def finish(report: Report, results: Sequence[Result], options: Options) -> None:
    pages = []
    for kind in options.kinds:
        mine = [each for each in results if each.kind == kind]
        show(table(kind, mine))
        pages.append(markdown(kind, mine))
        report.add(*verdicts(kind, mine))
    report.figures["peers"] = [asdict(each) for each in results]
    report.finish(options.out)
    (options.out / f"{report.name}.md").write_text("\n".join(pages), encoding="utf-8")
