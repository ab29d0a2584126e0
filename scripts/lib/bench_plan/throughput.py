"""Tokenise, pack and commit, against the same functions in `multiprocessing.Pool` without a lake.

Both sides take turns, in processes of their own, over the same corpora, once from end to end.
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.machine import MIB, program
from bench.machine import run as run_command
from bench.report import Report, at_least, load, median
from bench_plan.corpora import write_bpe, write_corpora

WORKERS = 2
BOUND = 0.85

PLAN = """
version: 1
output: {{ext: .safetensors, mesh: "dp=8", sequence_length: 4096, micro_batch_tokens: 16384}}
tokenizer: {tokenizer}
defaults: {{shuffle: {{block: 1MiB}}, epochs: 1}}
sources:
  code: {{format: jsonl, files: {corpora}/code/}}
  prose: {{format: jsonl, files: {corpora}/prose/}}
mix: {{code: {code}, prose: {prose}}}
until: {{exhausted: all}}
"""


def run(report: Report, directory: Path, *, quick: bool) -> None:
    report.say("writing corpora")
    write_bpe(directory / "bpe.json")
    for kind, whole_mib, tokenizer in (
        ("bpe", 16, f"{{kind: huggingface, file: {directory}/bpe.json}}"),
        ("bytes", 32, "{kind: bytes}"),
    ):
        mib = whole_mib // 8 if quick else whole_mib
        corpora = directory / kind
        write_corpora(corpora, mib * 3 // 4 * MIB, mib // 4 * MIB)
        plan = directory / f"{kind}.yaml"
        plan.write_text(PLAN.format(tokenizer=tokenizer, corpora=corpora, code=75, prose=25))
        _compare(report, directory, kind, plan, 1 if quick else 5)


def _compare(report: Report, directory: Path, kind: str, plan: Path, rounds: int) -> None:
    took: dict[str, list[float]] = {"lake": [], "pool": []}
    used: dict[str, list[float]] = {"lake": [], "pool": []}
    tokens = 0
    for number in range(rounds):
        positions = []
        for side in ("lake", "pool") if number % 2 else ("pool", "lake"):
            lake = directory / f"{kind}-{number}"
            order = {"side": side, "plan": str(plan), "lake": f"file://{lake}", "workers": WORKERS}
            answer = json.loads(run_command(program("bench_plan.sides", json.dumps(order))).stdout)
            took[side].append(answer["seconds"])
            used[side].append(answer["cpu_s"])
            positions.append(answer["position"])
            tokens = answer["tokens"]
        assert positions[0]["sources"] == positions[1]["sources"], "both sides took the same samples"
        run_command(["rm", "-r", str(lake)])
    ratios = [pool / lake for pool, lake in zip(took["pool"], took["lake"], strict=True)]
    rate = {side: tokens / median(seconds) / 1e6 for side, seconds in took.items()}
    report.figures.setdefault("throughput", {})[kind] = {
        "seconds": took,
        "cpu_s": used,
        "tokens": tokens,
        "load": load(),
    }
    report.add(
        at_least(
            BOUND,
            f"tokenise + pack + commit, {kind}, {WORKERS} workers",
            f"{rate['lake']:.2f} M tokens/s",
            f"Pool({WORKERS}) without a lake {rate['pool']:.2f}; CPU {median(used['pool']) / median(used['lake']):.2f} ×",
            median(ratios),
        )
    )
