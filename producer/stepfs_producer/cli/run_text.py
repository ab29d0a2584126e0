"""One run of `stepfs-produce text`: check everything that can be wrong, then open the producer and feed it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
import typer

from stepfs.cli.columns import printable
from stepfs.cli.failure import announce, say
from stepfs.errors import UsageError
from stepfs.format.payload.schema import PayloadSchema
from stepfs.lake.identity import payload_schema
from stepfs.store.opening import open_store
from stepfs.store.options import StoreOptions
from stepfs.store.silence import Silence
from stepfs_producer import Producer
from stepfs_producer.cli.ensure_lake import committed_positions, ensure_lake
from stepfs_producer.cli.feed import Ending, feed
from stepfs_producer.cli.progress import showing
from stepfs_producer.cli.stopping import Stopping
from stepfs_producer.cli.text_summary import TextSummary
from stepfs_producer.cli.vocabulary import Vocabulary
from stepfs_producer.payloads.described import refuse_other_arrays, text_schema, tokenizer_facts
from stepfs_producer.payloads.encode import encoder_for
from stepfs_producer.settings import GIVE_UP_AFTER_S
from stepfs_producer.sources.listing import list_sources
from stepfs_producer.text.beginning import default_id, refuse_other_shape, refuse_resharding
from stepfs_producer.text.finished import FinishedFiles
from stepfs_producer.text.records import Shard, TextSource
from stepfs_producer.text.steps import Shape, TextPosition, TextStep, late_files, resume, text_steps


@dataclass(frozen=True, slots=True)
class TextRun:
    """The command line, parsed."""

    lake: str
    inputs: tuple[Path, ...]
    slices: int | None
    seq_len: int
    batch_size: int
    ext: str | None
    producer_id: str | None
    shard: str
    vocabulary: Vocabulary
    text_field: str
    limit_steps: int | None
    steps_per_second: float | None
    store_options: StoreOptions
    as_json: bool


def produce_text(run: TextRun) -> int:
    """Run to the end of the source, the limit or a signal; the exit code."""
    shard = parse_shard(run.shard)
    files = list_sources(run.inputs)
    source = TextSource(files, shard=shard, text_field=run.text_field)
    tokenizer = run.vocabulary.tokenizer(files, text_field=run.text_field)
    check_ext = partial(encoder_for, vocabulary=tokenizer.vocabulary)
    facts = tokenizer_facts(tokenizer, run.vocabulary.file_digest, eos=tokenizer.end, pad=tokenizer.padding)

    def schema(ext: str) -> PayloadSchema:
        shape = (run.batch_size, run.seq_len)
        return text_schema(ext, shape, facts, vocabulary=tokenizer.vocabulary)

    identity = trio.run(
        partial(
            ensure_lake, run.lake, run.slices, run.ext, run.store_options, check_ext=check_ext, schema=schema
        )
    )
    shape = Shape(identity.slices, run.batch_size, run.seq_len, identity.ext)
    producer_id = run.producer_id or default_id(shard)
    resumed = partial(resume, source=source, shard=shard, tokenizer=tokenizer.identity)

    def look() -> None:
        positions = trio.run(committed_positions, run.lake, run.store_options)
        resumed(positions.get(producer_id))
        refuse_other_shape(positions, producer_id, shape)
        refuse_resharding(positions, producer_id, source)

    def looked_at_again(steps: Iterator[TextStep]) -> Iterator[TextStep]:
        """Check again before the first step: other producers may have begun since `look`. Once this producer has
        committed, its position protects it."""
        for number, step in enumerate(steps):
            if number == 0 and start.steps == 0:
                look()
            yield step

    # Before the producer is opened, which would fence a healthy one on behalf of a mistyped command.
    look()
    warning = refuse_other_arrays(run.lake, schema(identity.ext), payload_schema(identity, run.lake))
    if warning is not None:
        say(f"stepfs-produce: warning: {printable(warning)}")
    started = time.monotonic()
    with (
        Stopping() as stopping,
        _patient_producer(run.lake, producer_id, run.store_options) as producer,
    ):
        start = resumed(producer.position)
        refuse_other_shape({producer_id: producer.position}, producer_id, shape)
        grown = _grown(source, start)
        with showing(producer_id, len(files)) as show:

            def shown(position: TextPosition) -> None:
                if position.cursor is not None:
                    show(
                        position.steps, position.source_bytes, source.file_number(position.cursor.place.name)
                    )

            ending, position = feed(
                looked_at_again(text_steps(source, tokenizer, shape, start)),
                producer,
                start,
                stopping=stopping,
                steps_max=run.limit_steps,
                steps_per_second=run.steps_per_second,
                shown=shown,
            )
            producer.flush()
    summary = TextSummary(
        lake=run.lake,
        lake_id=identity.lake_id,
        producer_id=producer_id,
        start=start,
        end=position,
        ending=ending,
        seconds=time.monotonic() - started,
        skipped=len(source.skipped),
        passed=source.passed,
        late=max(late_files(source, position), 0),
        grown=list(dict.fromkeys([*grown, *_grown(source, position)])),
    )
    for warning in summary.warnings():
        say(f"stepfs-produce: warning: {printable(warning)}")
    typer.echo(summary.as_json() if run.as_json else summary.as_line())
    return stopping.exit_code if ending is Ending.STOPPED else 0


@contextmanager
def _patient_producer(lake: str, producer_id: str, store_options: StoreOptions) -> Iterator[Producer]:
    """A producer that reports a silent store. Once started it waits longer, because its pipeline is worth keeping."""
    silence = Silence(announce)
    store = open_store(lake, options=store_options, silence=silence)
    try:
        with Producer(lake, producer_id=producer_id, store=store) as producer:
            silence.set_limit(GIVE_UP_AFTER_S)
            yield producer
    finally:
        trio.run(store.aclose)


def _grown(source: TextSource, position: TextPosition) -> list[str]:
    if position.cursor is None:
        return []
    return source.grown(FinishedFiles(position.finished), position.cursor.place)


def parse_shard(text: str) -> Shard:
    """`I/N` → the shard."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise UsageError(f"--shard {text}: write I/N, such as 0/2 and 1/2 for two producers")
    return Shard(int(index), int(count))
