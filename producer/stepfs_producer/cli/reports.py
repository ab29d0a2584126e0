"""What the commands of `stepfs-produce` print: lines for people, or a JSON document."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, NoReturn

import trio
import typer

from stepfs._internal import interruption
from stepfs._internal.limits import usable_cpus
from stepfs.cli.columns import printable, size_text, table
from stepfs.cli.failure import announce, say
from stepfs.cli.live import Job, Mark, progress, short
from stepfs.cli.target import opened_lineage
from stepfs.errors import AbsentError, DifferentError
from stepfs.format.ids import JSON_SCHEMA, POSITION_BYTES_MAX
from stepfs.format.planned import counts_shown
from stepfs.store.api import StoreOptions
from stepfs_producer.engine.worker import find_modules_in
from stepfs_producer.plan.file.digest import plan_digest
from stepfs_producer.plan.file.schema import json_schema
from stepfs_producer.plan.file.yaml_file import PlanFile
from stepfs_producer.plan.mix import ONE, MixEntry
from stepfs_producer.plan.model import Plan, position_bytes
from stepfs_producer.plan.parts import Stage
from stepfs_producer.plan.resolve import resolve
from stepfs_producer.plan.rules import Exhausted
from stepfs_producer.plan.sources import Text
from stepfs_producer.plan.values import Document
from stepfs_producer.run.check import (
    Inspection,
    PlanEstimate,
    SourceFacts,
    compare_with_lake,
    estimate_plan,
    inspect,
    simulate_plan,
)
from stepfs_producer.run.history.find import Absence, Found, NotSearched, Occurrence, RecordQuery, find_record
from stepfs_producer.run.history.replay import Replay, ReplayOptions, replay
from stepfs_producer.run.memory import PAGE_COPIES, least_bytes, longest_text_bytes
from stepfs_producer.run.options import RunOptions
from stepfs_producer.run.pipeline import EndReason
from stepfs_producer.run.prepare import LocatedPlan, grid_of, plan_at, plan_file_at
from stepfs_producer.run.results import PlanTotals, RunResult, Show, SimulationResult
from stepfs_producer.run.session import Stopping, run_plan
from stepfs_producer.run.tokenize import tokenize_source
from stepfs_producer.sources.record import RECORD_BYTES_MAX
from stepfs_producer.transforms.tokenizer import TEXT_BYTES_MAX

_USAGE: Final = 2
_NOTES_EVERY_S: Final = 0.2
_BAD_SHOWN: Final = 3
_PAGE_BYTES_MAX: Final = 64 << 20
_LINE_TOKENS: Final = 100  # documents that are shorter in the mean may be lines
_LINES_MAX: Final = 20


def schema_text() -> str:
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema()}, indent=1)


def keys_text() -> str:
    """Every key of a plan file, part by part, with its default and its meaning."""
    schema = json_schema()
    lines = ["version: 1 and these keys; a key without `= …` has no default, or none of its own."]
    for title, either in [("plan", schema), *schema["$defs"].items()]:
        part = either if "properties" in either else either["anyOf"][0]  # or the word that stands for it
        lines += ["", f"{title}: {_one_line(part.get('description', ''))}"]
        for key, each in part["properties"].items():
            default = f" = {json.dumps(each['default'])}" if each.get("default") is not None else ""
            said = _one_line(each.get("description", ""))
            lines += wrap(
                f"{key}{default}" + (f": {said}" if said else ""), 100, initial_indent="  ", subsequent_indent="      "
            )
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def check_plan(
    path: Path, options: RunOptions | None, *, held_out: bool, sources: bool, deep: bool, as_json: bool
) -> str:
    """The report. Exits with the mistakes on stderr if there are any. `options`: of a run, to compare its lake, too."""
    file = plan_file_at(path, sources=sources)
    if sources:
        find_modules_in(str(path.parent))
    directory = str(path.parent)
    found = inspect(file.plan, held_out=held_out, directory=directory, deep=deep) if sources else Inspection()
    if found.findings:
        refuse(file, found)
    lake = None
    if options is not None:
        place = LocatedPlan(file.plan, directory, held_out)
        is_there = interruption.run(compare_with_lake, place, found.listings, options, _warn)
        lake = {"url": options.lake, "exists": is_there}
    plan = resolve(file.plan)
    facts = found.facts if sources else None
    report = _Report(plan, estimate_plan(plan), facts, lake, found.tokenizer, found.other_ids, found.unmet)
    return json.dumps(report.as_document(), ensure_ascii=False) if as_json else "\n".join(report.lines())


def refuse(file: PlanFile, found: Inspection) -> NoReturn:
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
    tokenizer: str = ""
    other_ids: str | None = None
    unmet: AbstractSet[Document] = frozenset()

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
            "micro_batch_tokens": self.plan.micro_batch_tokens,
            "step_tokens": self.estimate.step_tokens,
            "stages": [
                {"from": one.from_, "sequence_length": one.sequence_length, "lengths": one.lengths}
                for one in self.plan.stages
            ],
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
        lengths = ", ".join(map(_rows_text, self.plan.stages))
        yield f"plan       {plan_digest(self.plan)}"
        kind = "coordinate of dp" if output.files == "ranks" else "micro-batch of it"
        has = f"has {len(grid.files)} slices" if len(grid.files) > 1 else "is a slice"
        yield f"slices     {grid.slices} (mesh {mesh}: {mesh.world} ranks; each {kind} {has})"
        yield (
            f"step       {self.estimate.step_tokens} tokens: {mesh.data_ranks} data ranks × {output.micro_batches} micro-batches × "
            f"{self.plan.micro_batch_tokens}; rows of {lengths}"
        )
        yield f"steps      {self._steps_text()}"
        if self.tokenizer:
            yield f"tokenizer  {printable(self.tokenizer)}"
        for name, facts in (self.facts or {}).items():
            if facts.ending is not None and facts.ending.learned:
                yield printable(f"answers    {name}: end with {facts.ending.token}, which is learned")
        position = position_bytes(sorted(self.plan.sources))
        yield f"position   {position} bytes at most, of {POSITION_BYTES_MAX}"
        memory = self._memory()
        if memory is not None:
            longest = size_text(self._memory_longest() or 0)
            yield f"memory     {size_text(memory)} at least, with one worker per core; {longest} while all have a longest text or page"
        if self.lake is not None:
            fits = "the plan fits it" if self.lake["exists"] else "not there yet; a run creates it"
            yield f"lake       {printable(self.lake['url'])}: {fits}"
        yield f"record     {size_text(RECORD_BYTES_MAX)} at most, {size_text(self._text_bytes())} of text; a longer one is a bad record"
        yield ""
        yield from table(*self._table())
        for warning in self.warnings():
            yield f"note: {printable(warning)}"

    def warnings(self) -> Iterator[str]:
        if self.other_ids is not None:
            yield f"tokenizer: {self.other_ids}"
        if self.unmet:
            first = min(self.unmet, key=str)
            shown = first if isinstance(first, str) else f"{first[0]}, {first[1]} at {first[2]}"
            yield f"exclude: {len(self.unmet)} of {len(self.plan.exclude)} documents match nothing ({shown})"
        for name, facts in (self.facts or {}).items():
            yield from (f"source {name}: {what}" for what in self._of_records(name, facts))
            yield from (f"source {name}: {what}" for what in self._of_documents(name, facts))

    def _of_records(self, name: str, facts: SourceFacts) -> Iterator[str]:
        if facts.bad:
            reason = "; ".join(list(facts.bad.values())[:_BAD_SHOWN])
            yield (
                f"{len(facts.bad)} of {facts.sampled} records looked at cannot be decoded ({reason}); a run stops at the first one "
                "unless on_error: {do: skip} allows it"
            )
        if facts.sampled > len(facts.bad) and facts.learned is None:
            yield (
                f"none of the {facts.sampled} records looked at gives a token: they are empty, or its transform drops them; a run "
                "would end with an error"
            )
        if facts.page_bytes > _PAGE_BYTES_MAX:
            yield (
                f"a page of its Parquet files may have {size_text(facts.page_bytes)}, and a worker that reads it takes "
                f"{size_text(PAGE_COPIES * facts.page_bytes)}; write row groups of fewer rows if that is too much"
            )
        if facts.unread:
            yield f"nothing of {facts.unread[0]} can be read" + _and_more(len(facts.unread) - 1)
        if facts.excluded:
            yield f"{facts.excluded} of {facts.sampled} records looked at are excluded"
        if facts.spelled is not None:
            taken = self.plan.tokenizer.control_tokens or "text"
            other = "tokens takes it for the token" if taken == "text" else "text takes it for characters"
            yield f"a record spells {facts.spelled}; tokenizer: {{control_tokens: {taken}}} holds, {other}"
        needed, declared = self._epochs(name), self._declared(name)
        if needed is not None and declared is not None and needed > declared:
            yield (
                f"the plan takes about {float(needed):.1f} epochs of it and it has {float(declared):g}; it will be exhausted, and "
                "the others take its share"
            )

    def _of_documents(self, name: str, facts: SourceFacts) -> Iterator[str]:
        source = self.plan.sources[name]
        if source.chat is not None and facts.learned == 1:
            yield "every token of the chats looked at is learned, the user's too; is that what chat.learn says?"
        if facts.tools:
            yield "its records have tools, which templates do not get; chat: {tools: tools} names their field"
        if facts.ending is not None and not facts.ending.learned:
            yield _unlearned_end(facts.ending.token)
        if facts.dropped:
            room = min(stage.lengths.get(name, stage.sequence_length) for stage in self.plan.stages)
            advice = "; long: split or truncate cuts them between turns" if source.is_cut_by_turns else ""
            yield (
                f"{facts.dropped} of {facts.sampled} records looked at are longer than a row of {room} tokens, and dropped{advice}"
            )
        if facts.left:
            yield f"{facts.left} of {facts.documents} documents looked at are longer than a row, and stay as they are, without fim"
        mean = facts.document_tokens
        if isinstance(source, Text) and source.records == "lines" and mean is not None and mean < _LINE_TOKENS:
            yield f"a document has {mean:.0f} tokens in the mean, as each line is one; records: files takes each file for one"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        entries = self.estimate.mix
        header = ["SOURCE", "FORMAT", *(_step_text(entry.step, ramp=entry.ramp) for entry in entries)]
        if self.facts is not None:
            header += ["FILES", "BYTES", "TOKENS", "DOCUMENT", "LEARNED", "EPOCHS"]
        rows = []
        for name in sorted(self.plan.sources):
            row = [printable(name), printable(self.plan.sources[name].format)]
            row += [f"{float(self._shares(entry)[name]):.3%}" for entry in entries]
            if self.facts is not None:
                facts, epochs = self.facts[name], self._epochs(name)
                tokens = _about(facts.tokens)
                learned = "-" if facts.learned is None else f"≈ {facts.learned:.1%}"
                mean = "-" if facts.document_tokens is None else f"≈ {facts.document_tokens:.0f}"
                row += [str(facts.files), size_text(facts.bytes), tokens, mean, learned]
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
            "document_tokens": None
            if facts is None or facts.document_tokens is None
            else round(facts.document_tokens, 1),
            "learned": None if facts is None or facts.learned is None else round(facts.learned, 6),
            "dropped": None if facts is None else facts.dropped,
            "plain": None if facts is None else facts.left,
            "excluded": None if facts is None else facts.excluded,
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
        """The same, while every worker makes tokens of a text as long as one may be, or reads as large a page."""
        least = self._memory()
        if self.facts is None or least is None:
            return None
        tokens = max((facts.tokens_at_once for facts in self.facts.values()), default=0)
        of_model = self.plan.tokenizer.file is not None
        page = max((facts.page_bytes for facts in self.facts.values()), default=0)
        return least + usable_cpus() * max(longest_text_bytes(tokens, of_model=of_model), PAGE_COPIES * page)

    def _text_bytes(self) -> int:
        """The longest text that becomes tokens."""
        return RECORD_BYTES_MAX if self.plan.tokenizer.file is None else TEXT_BYTES_MAX

    def _steps_text(self) -> str:
        if self.estimate.steps is not None:
            return f"{self.estimate.steps} at most"
        ends = [source.epochs is not None for source in self.plan.sources.values()]
        first = self.plan.until.exhausted is Exhausted.FIRST
        return "until the sources end" if (any(ends) if first else all(ends)) else "without end"

    def _epochs(self, name: str) -> Fraction | None:
        """About how often the plan reads the source until its end."""
        tokens = None if self.facts is None else self.facts[name].tokens
        if not tokens or self.estimate.tokens is None:
            return None
        return Fraction(self.estimate.tokens[name], tokens)

    def _declared(self, name: str) -> Fraction | None:
        return self.plan.sources[name].epochs


def _about(count: int | None) -> str:
    return "?" if count is None else f"≈ {count}"


def _unlearned_end(token: str | None) -> str:
    if token is None:
        return "no control token ends an answer, so a model learns no end of it; add stop: [TOKEN] to its chat"
    what = f"an answer ends with {token}, which is not learned, so a model learns no end of it"
    return f"{what}; add stop: ['{token}'] to its chat"


def _and_more(count: int) -> str:
    return f", nor of {count} more files" if count else ""


def _step_text(step: int, *, ramp: bool) -> str:
    return f"{'TO' if ramp else 'FROM'} STEP {step}"


def _rows_text(stage: Stage) -> str:
    begins = f" from step {stage.from_}" if stage.from_ else ""
    own = ", ".join(f"{printable(name)} {length}" for name, length in stage.lengths.items())
    return f"{stage.sequence_length}{begins}" + (f" ({own})" if own else "")


def find_report(
    lake: str, options: StoreOptions, source: str, file: str, record: int, *, plan_dir: str, as_json: bool
) -> str:
    """`AbsentError` if no step holds the record."""
    asked = RecordQuery(source, file, record, plan_dir)
    found = interruption.run(partial(_found, lake, options, asked))
    if not any(isinstance(one, Occurrence) for one in found):
        why = [f"epoch {one.epoch} of {one.producer}: {one.why}" for one in found if isinstance(one, Absence)][:5]
        why += [one.line() for one in found if isinstance(one, NotSearched)]
        raise AbsentError(
            f"no step that was searched holds record {record} of {file}; {'; '.join(why) or 'the source was not drawn yet'}"
        )
    return _find_document(lake, asked, found) if as_json else "\n".join(_find_lines(found))


async def _found(lake: str, options: StoreOptions, asked: RecordQuery) -> Sequence[Found]:
    async with opened_lineage(lake, options) as reader:
        return await find_record(reader.log, reader, asked)


def _find_document(lake: str, asked: RecordQuery, found: Sequence[Found]) -> str:
    return json.dumps(
        {
            "schema": JSON_SCHEMA,
            "lake": lake,
            "source": asked.source,
            "file": asked.file,
            "record": asked.record,
            "found": [asdict(one) for one in found if isinstance(one, Occurrence)],
            "missing": [asdict(one) for one in found if isinstance(one, Absence)],
            "not_searched": [asdict(one) for one in found if isinstance(one, NotSearched)],
        },
        ensure_ascii=False,
    )


def _find_lines(found: Sequence[Found]) -> Iterator[str]:
    header = ["EPOCH", "STEP", "RANK", "MICRO", "START", "TOKENS", "FIRST", "PRODUCER"]
    yield from table(
        header,
        [
            [str(getattr(one, name.lower())) for name in header[:-1]] + [printable(one.producer)]
            for one in found
            if isinstance(one, Occurrence)
        ],
    )
    for one in found:
        if isinstance(one, Absence):
            yield printable(f"epoch {one.epoch} of {one.producer}: {one.why}")
        elif isinstance(one, NotSearched):
            yield printable(one.line())


def _warn(line: str, level: int = logging.WARNING) -> None:
    announce(printable(line), level)


def run_shown(place: LocatedPlan, options: RunOptions, job: Job) -> tuple[RunResult | None, int]:
    """Run to the end of the plan, the limit or a signal; the result, if it came to one, and the exit code."""
    with Stopping(_warn) as stopping:
        show = partial(showing_plan, job=job)
        try:
            result = trio.run(partial(run_plan, place, options, stopping, say=_warn, progress=show))
        except KeyboardInterrupt:
            return None, stopping.exit_code
    return result, stopping.exit_code if result.ending is EndReason.STOPPED else 0


def report_run(place: LocatedPlan, result: RunResult | None, *, as_json: bool) -> None:
    if result is None:
        return
    for line in result.totals.bad_lines():
        _warn(f"skipped: {line}")
    met = any(one["excluded"] for one in result.totals.sources().values())
    if place.plan.exclude and not met and not any(one.excluded for one in result.totals.state.sources.values()):
        _warn(f"exclude: none of its {len(place.plan.exclude)} documents was met in {result.totals.state.step} steps")
    typer.echo(json.dumps(result.document()) if as_json else _run_line(result))


def _run_line(result: RunResult) -> str:
    totals = result.totals
    ended = {
        EndReason.COMPLETE: result.reason,
        EndReason.LIMIT: "the limit is reached",
        EndReason.STOPPED: "stopped; run the same command again to continue",
    }[result.ending]
    sealed = "; the lake is sealed" if result.sealed else ""
    if not totals.steps:
        sealed = "; sealed, nothing to do" if result.sealed else ""
        return f"{result.producer_id}: no further step; {totals.state.step} steps in total; {ended}{sealed}"
    measures = totals.measures()
    shares = ", ".join(
        f"{printable(name)} {one['share']:.2%}"
        + (f", {one['learned']:.1%} of it learned" if one["learned"] not in {None, 1} else "")
        + (f" ({one['skipped']} records skipped)" if one["skipped"] else "")
        + (f" ({one['dropped']} longer than a row dropped)" if one["dropped"] else "")
        + (f" ({one['excluded']} excluded)" if one["excluded"] else "")
        + (f" ({one['plain']} longer than a row left without fim)" if one["plain"] else "")
        for name, one in totals.sources().items()
    )
    bottleneck = "" if result.bottleneck is None else f"bottleneck: {printable(str(result.bottleneck))}; "
    return (
        f"{result.producer_id}: {totals.steps} steps in {result.seconds:.1f} s, all committed; {totals.state.step} steps in "
        f"total; {totals.tokens} tokens ({shares}), fill {measures['fill']:.4f}, slowest ÷ mean rank "
        f"{measures['slowest_to_mean']:.4f}; {bottleneck}{ended}{sealed}"
    )


@contextmanager
def showing_plan(name: str, steps_max: int | None, job: Job | None = None) -> Iterator[Show]:
    """A callable (totals, tokens held ahead by source) that keeps what is shown current; by itself without a `job`."""
    with progress(name) if job is None else nullcontext(job) as shown:
        due_s, notes, said = 0.0, list[str](), ""

        def show(totals: PlanTotals, held: Mapping[str, int]) -> None:
            nonlocal due_s, notes, said
            if time.monotonic() >= due_s:  # steps may be many
                due_s = time.monotonic() + _NOTES_EVERY_S
                notes, said = [*_plan_notes(totals, held)], _plan_line(totals)
            counts = {"steps": totals.state.step, "tokens": totals.tokens}
            shown.update(Mark(counts, steps_max, notes, said))

        yield show


def _plan_line(totals: PlanTotals) -> str:
    shares = (f"{printable(name)} {one['share']:.2%}" for name, one in totals.sources().items())
    return ", ".join(shares) + totals.pace()


def _plan_notes(totals: PlanTotals, held: Mapping[str, int]) -> Iterator[str]:
    measures = totals.measures()
    yield (
        f"fill {measures['fill']:.3f}, slowest ÷ mean rank {measures['slowest_to_mean']:.3f}, "
        f"planning {measures['planning_ms']:.0f} ms a step"
    )
    yield from filter(None, totals.pace().split("; "))
    yield ""
    rows = [
        [name, f"{one['share']:.2%}", f"{one['wanted']:.2%}", short(one["tokens"]), short(held.get(name, 0))]
        for name, one in sorted(totals.sources().items(), key=lambda named: -named[1]["tokens"])
    ]
    yield from table(["SOURCE", "SHARE", "WANTED", "TOKENS", "AHEAD"], rows)


def simulation_report(path: Path, *, steps: int, workers: int | None, held_out: bool, as_json: bool) -> str:
    place = plan_at(path, held_out=held_out)
    done = interruption.run(partial(simulate_plan, place, steps, workers, say=_warn, progress=showing_plan))
    return json.dumps(done.document(), ensure_ascii=False) if as_json else "\n".join(_page(done))


def _page(done: SimulationResult) -> Iterator[str]:
    totals, measures = done.totals, done.totals.measures()
    yield f"steps      {totals.steps} in {done.seconds:.1f} s; {done.reason}"
    yield f"tokens     {totals.tokens}, fill {measures['fill']:.4f}, {measures['padding_tokens']} of padding"
    yield (
        f"balance    slowest ÷ mean rank {measures['slowest_to_mean']:.4f}, at each micro-batch "
        f"{measures['slowest_to_mean_micro']:.4f}"
    )
    for name, load in measures.get("loads", {}).items():
        yield (
            f"  {name:8} slowest ÷ mean rank {load['slowest_to_mean']:.4f}, at each micro-batch "
            f"{load['slowest_to_mean_micro']:.4f}"
        )
    yield f"documents  {measures['cut_documents']} cut, {measures['lost_tokens']} tokens lost by truncate or drop"
    yield f"planning   {measures['planning_ms']:.1f} ms a step"
    yield ""
    counted = counts_shown(totals.sources().values())
    header = ["SOURCE", "SHARE", "WANTED", "TOKENS", "LEARNED", *map(str.upper, counted)]
    rows = [
        [
            printable(name),
            f"{one['share']:.3%}",
            f"{one['wanted']:.3%}",
            str(one["tokens"]),
            "-" if one["learned"] is None else f"{one['learned']:.1%}",
            *(str(one[key]) for key in counted),
        ]
        for name, one in totals.sources().items()
    ]
    yield from table(header, rows)
    yield from (printable(f"skipped: {line}") for line in totals.bad_lines())


def tokenize_report(path: Path, out: Path, *, source: str, workers: int | None, held_out: bool, as_json: bool) -> str:
    place = plan_at(path, held_out=held_out)
    with progress(f"tokenize {source}") as job:

        def show(parts: int, whole: int) -> None:
            job.update(Mark({"parts": parts}, whole))

        done = interruption.run(partial(tokenize_source, place, source, out, workers, show=show))
    if as_json:
        return json.dumps({"schema": JSON_SCHEMA, **done.document()}, ensure_ascii=False)
    skipped = f"; {done.skipped} records skipped, the first {done.first_skipped}" if done.skipped else ""
    return printable(
        f"{done.prefix}.bin, .idx: {done.documents} documents, {done.tokens} tokens of {done.token_bytes} bytes{skipped}"
    )


def replay_and_report(options: ReplayOptions, store_options: StoreOptions, *, as_json: bool) -> int:
    """The exit code."""
    done = interruption.run(_replayed, options, store_options)
    for line in _trouble(done):
        _warn(line)
    typer.echo(json.dumps(_replay_document(done), ensure_ascii=False) if as_json else _replay_line(done))
    return DifferentError.exit_code if done.found.different else 0


async def _replayed(options: ReplayOptions, store_options: StoreOptions) -> Replay:
    async with opened_lineage(options.lake, store_options) as reader:
        return await replay(options, reader, progress=showing_plan)


def _replay_document(done: Replay) -> dict[str, Any]:
    options = done.options
    return {
        "schema": JSON_SCHEMA,
        "lake": options.lake,
        "lake_id": done.lake_id,
        "producer": done.producer_id,
        "plans": done.plans,
        "first_step": options.steps.start,
        "next_step": options.steps.stop,
        "ranks": None if options.ranks is None else list(options.ranks),
        "to": None if options.to is None else str(options.to),
        "steps": done.found.steps,
        "different": sorted(done.found.different),
        "differences": [asdict(one) for one in done.found.shown],
        "libraries": [asdict(one) for one in done.libraries],
        "seconds": round(done.seconds, 3),
    }


def _trouble(done: Replay) -> Iterator[str]:
    for one in done.found.shown[:_LINES_MAX]:
        where = "" if one.slice is None else f", rank {one.rank} (slice {one.slice})"
        yield f"step {one.step}{where}: {one.what}"
    if done.found.different:
        for change in done.libraries:
            yield f"then {change.library} {change.then or 'not installed'}, now {change.now or 'not installed'}"


def _replay_line(done: Replay) -> str:
    found, options = done.found, done.options
    steps = "1 step" if found.steps == 1 else f"{found.steps} steps"
    what = f"{steps} of {printable(done.producer_id)} made again in {done.seconds:.1f} s"
    if options.to is None:
        return f"{what}: " + (f"{len(found.different)} differ" if found.different else "all the same")
    files = "1 file" if found.files == 1 else f"{found.files} files"
    missing = f"; {len(found.different)} could not be made" if found.different else ""
    return f"{what}: {files} written to {printable(str(options.to))}, nothing compared with the lake{missing}"
