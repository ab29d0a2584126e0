"""What `stepfs-produce check` prints: mistakes, or a page on the plan, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import typer

from stepfs import interruption
from stepfs.cli.columns import printable, size_text, table
from stepfs.cli.failure import announce, say
from stepfs.format.ids import JSON_SCHEMA, POSITION_BYTES_MAX
from stepfs.limits import usable_cpus
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.plan.draw import ONE, MixEntry
from stepfs_producer.plan.file.digest import micro_batch_tokens, plan_digest, stages_of, with_defaults
from stepfs_producer.plan.file.schema import Plan, Stage, position_bytes
from stepfs_producer.plan.file.yaml_file import PlanFile
from stepfs_producer.plan.rules import Exhausted
from stepfs_producer.run.check import Inspection, PlanEstimate, SourceFacts, estimate_plan, inspect
from stepfs_producer.run.memory import least_bytes, longest_text_bytes
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.prepare import LocatedPlan, compare_with_lake, grid_of, plan_file_at
from stepfs_producer.sources.record import RECORD_BYTES_MAX
from stepfs_producer.transforms.tokenizer import TEXT_BYTES_MAX

_USAGE: Final = 2


def schema_text() -> str:
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}, indent=1)


def check_plan(path: Path, options: RunOptions | None, *, held_out: bool, sources: bool, as_json: bool) -> str:
    """The report. Exits with the mistakes on stderr if there are any. `options`: of a run, to compare its lake, too."""
    file = plan_file_at(path)
    if sources:
        find_modules_in(str(path.parent))
    directory = str(path.parent)
    found = inspect(file.plan, held_out=held_out, directory=directory) if sources else Inspection()
    if found.findings:
        _refuse(file, found)
    lake = None
    if options is not None:
        place = LocatedPlan(file.plan, directory, held_out)
        is_there = interruption.run(
            compare_with_lake, place, found.listings, options, lambda line: announce(printable(line))
        )
        lake = {"url": options.lake, "exists": is_there}
    report = _Report(file.plan, estimate_plan(file.plan), found.facts if sources else None, lake)
    return json.dumps(report.as_document(), ensure_ascii=False) if as_json else "\n".join(report.lines())


def _refuse(file: PlanFile, found: Inspection) -> None:
    """Mistakes of the plan come first: 2 if there is one, else the code of the first error."""
    codes = [finding.exit_code for finding in found.findings]
    error = file.error([finding.problem for finding in found.findings])
    say("stepfs-produce: " + "\n".join(map(printable, str(error).split("\n"))))
    raise typer.Exit(_USAGE if _USAGE in codes else codes[0])


@dataclass(frozen=True, slots=True)
class _Report:
    plan: Plan
    estimate: PlanEstimate
    facts: Mapping[str, SourceFacts] | None  # None: sources were not looked at
    lake: Mapping[str, Any] | None  # None: no lake was named

    def as_document(self) -> dict[str, Any]:
        output = self.plan.output
        return {
            "schema": JSON_SCHEMA,
            "plan": plan_digest(self.plan),
            "slices": grid_of(self.plan).slices,
            "ranks": output.mesh.world,
            "mesh": str(output.mesh),
            "files": output.files,
            "micro_batches": output.micro_batches,
            "micro_batch_tokens": micro_batch_tokens(self.plan),
            "step_tokens": self.estimate.step_tokens,
            "stages": [stage.model_dump(by_alias=True) for stage in stages_of(self.plan)],
            "mix": [
                {
                    "step": entry.step,
                    "ramp": entry.ramp,
                    "shares": {name: float(one) for name, one in self._shares(entry).items()},
                }
                for entry in self.estimate.mix
            ],
            "steps": self.estimate.steps,
            "position_bytes": position_bytes(sorted(self.plan.sources)),
            "position_bytes_limit": POSITION_BYTES_MAX,
            "memory_bytes": self._memory(),
            "memory_bytes_longest": self._memory_longest(),
            "record_bytes_limit": RECORD_BYTES_MAX,
            "text_bytes_limit": self._text_bytes(),
            "sources": {name: self._source(name) for name in sorted(self.plan.sources)},
            "lake": self.lake,
            "warnings": list(self.warnings()),
        }

    def lines(self) -> Iterator[str]:
        output, grid = self.plan.output, grid_of(self.plan)
        mesh = output.mesh
        lengths = ", ".join(map(_rows_text, stages_of(self.plan)))
        yield f"plan       {plan_digest(self.plan)}"
        kind = "coordinate of dp" if output.files == "ranks" else "micro-batch of it"
        has = f"has {len(grid.files)} slices" if len(grid.files) > 1 else "is a slice"
        yield f"slices     {grid.slices} (mesh {mesh}: {mesh.world} ranks; each {kind} {has})"
        yield (
            f"step       {self.estimate.step_tokens} tokens: {mesh.data_ranks} data ranks × {output.micro_batches} micro-batches × "
            f"{micro_batch_tokens(self.plan)}; rows of {lengths}"
        )
        yield f"steps      {self._steps_text()}"
        position = position_bytes(sorted(self.plan.sources))
        yield f"position   {position} bytes at most, of {POSITION_BYTES_MAX}"
        memory = self._memory()
        if memory is not None:
            longest = size_text(self._memory_longest() or 0)
            yield f"memory     {size_text(memory)} at least, with one worker per core; {longest} while all have a longest text"
        if self.lake is not None:
            fits = "the plan fits it" if self.lake["exists"] else "not there yet; a run creates it"
            yield f"lake       {printable(self.lake['url'])}: {fits}"
        yield f"record     {size_text(RECORD_BYTES_MAX)} at most, {size_text(self._text_bytes())} of text; a longer one is a bad record"
        yield ""
        yield from table(*self._table())
        for warning in self.warnings():
            yield f"note: {printable(warning)}"

    def warnings(self) -> Iterator[str]:
        for name, facts in (self.facts or {}).items():
            if facts.bad:
                reason = next(iter(facts.bad.values()))
                yield (
                    f"source {name}: {len(facts.bad)} of {facts.sampled} records looked at cannot be decoded ({reason}); "
                    "a run stops at the first one unless on_error: {do: skip} allows it"
                )
            needed, declared = self._epochs(name), self._declared(name)
            if needed is not None and declared is not None and needed > declared:
                yield (
                    f"source {name}: the plan takes about {float(needed):.1f} epochs of it and it has {float(declared):g}; "
                    "it will be exhausted, and the others take its share"
                )

    def _table(self) -> tuple[list[str], list[list[str]]]:
        entries = self.estimate.mix
        header = ["SOURCE", "FORMAT", *(_step_text(entry.step, ramp=entry.ramp) for entry in entries)]
        if self.facts is not None:
            header += ["FILES", "BYTES", "TOKENS", "EPOCHS"]
        rows = []
        for name in sorted(self.plan.sources):
            row = [printable(name), printable(self.plan.sources[name].format)]
            row += [f"{float(self._shares(entry)[name]):.3%}" for entry in entries]
            if self.facts is not None:
                facts, epochs = self.facts[name], self._epochs(name)
                tokens = "?" if facts.tokens is None else f"≈ {facts.tokens}"
                row += [str(facts.files), size_text(facts.bytes), tokens]
                row.append("-" if epochs is None else f"≈ {float(epochs):.2f}")
            rows.append(row)
        return header, rows

    def _shares(self, entry: MixEntry) -> dict[str, Fraction]:
        return {name: Fraction(share, ONE) for name, share in zip(sorted(self.plan.sources), entry.shares, strict=True)}

    def _source(self, name: str) -> dict[str, Any]:
        facts = None if self.facts is None else self.facts[name]
        needed, declared = self._epochs(name), self._declared(name)
        return {
            "format": self.plan.sources[name].format,
            "files": None if facts is None else facts.files,
            "bytes": None if facts is None else facts.bytes,
            "tokens": None if facts is None else facts.tokens,
            "epochs": None if declared is None else float(declared),
            "epochs_needed": None if needed is None else round(float(needed), 6),
        }

    def _memory(self) -> int | None:
        """The least that a run with one worker per core needs."""
        if self.facts is None:
            return None
        blocks = (facts.largest_block_bytes for facts in self.facts.values())
        return least_bytes(blocks, self.estimate.step_tokens, usable_cpus())

    def _memory_longest(self) -> int | None:
        """The same, while every worker makes tokens of a text as long as one may be."""
        least = self._memory()
        if self.facts is None or least is None:
            return None
        tokens = max((facts.tokens_at_once for facts in self.facts.values()), default=0)
        of_model = self.plan.tokenizer.file is not None
        return least + usable_cpus() * longest_text_bytes(tokens, of_model=of_model)

    def _text_bytes(self) -> int:
        """The longest text that becomes tokens."""
        return RECORD_BYTES_MAX if self.plan.tokenizer.file is None else TEXT_BYTES_MAX

    def _steps_text(self) -> str:
        if self.estimate.steps is not None:
            return f"{self.estimate.steps} at most"
        ends = [source.epochs is not None for source in with_defaults(self.plan).values()]
        first = self.plan.until.exhausted is Exhausted.FIRST
        return "until the sources end" if (any(ends) if first else all(ends)) else "without end"

    def _epochs(self, name: str) -> Fraction | None:
        """About how often the plan reads the source until its end."""
        tokens = None if self.facts is None else self.facts[name].tokens
        if not tokens or self.estimate.tokens is None:
            return None
        return Fraction(self.estimate.tokens[name], tokens)

    def _declared(self, name: str) -> Fraction | None:
        return with_defaults(self.plan)[name].epochs


def _step_text(step: int, *, ramp: bool) -> str:
    return f"{'TO' if ramp else 'FROM'} STEP {step}"


def _rows_text(stage: Stage) -> str:
    begins = f" from step {stage.from_}" if stage.from_ else ""
    own = ", ".join(f"{printable(name)} {length}" for name, length in stage.lengths.items())
    return f"{stage.sequence_length}{begins}" + (f" ({own})" if own else "")
