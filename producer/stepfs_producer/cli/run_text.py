"""One run of `stepfs-produce text`: look at everything that can be wrong, then open the producer and feed it."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio
import typer

from stepfs.errors import UsageError
from stepfs.format.records import LakeIdentity
from stepfs_producer import Producer
from stepfs_producer.cli.ensure_lake import committed_position, ensure_lake
from stepfs_producer.cli.feed import Ending, feed
from stepfs_producer.cli.progress import showing
from stepfs_producer.cli.stopping import Stopping
from stepfs_producer.cli.vocabulary import bpe_for
from stepfs_producer.plan.listing import list_sources
from stepfs_producer.plan.payload import encoder_for
from stepfs_producer.plan.source import Shard, TextSource
from stepfs_producer.plan.text import Shape, TextPosition, resume, text_steps
from stepfs_producer.plan.tokenize import ByteTokenizer, Tokenizer


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
    bpe: bool
    vocab_size: int
    tokenizer_file: Path | None
    text_field: str
    limit_steps: int | None
    steps_per_second: float | None
    endpoint_url: str | None
    as_json: bool


def produce_text(run: TextRun) -> int:
    """Run to the end of the source, the limit or a signal; the exit code."""
    shard = parse_shard(run.shard)
    files = list_sources(run.inputs)
    source = TextSource(files, shard=shard, text_field=run.text_field)
    tokenizer: Tokenizer = ByteTokenizer()
    if run.bpe:
        tokenizer = bpe_for(
            files, text_field=run.text_field, vocabulary=run.vocab_size, path=run.tokenizer_file
        )
    check_ext = partial(encoder_for, vocabulary=tokenizer.vocabulary)
    identity = trio.run(
        partial(ensure_lake, run.lake, run.slices, run.ext, run.endpoint_url, check_ext=check_ext)
    )
    producer_id = run.producer_id or f"text-{shard.index}-of-{shard.count}"
    resumed = partial(resume, source=source, shard=shard, tokenizer=tokenizer.identity)
    # Before the producer is opened, which would fence a healthy one on behalf of a mistyped command.
    resumed(trio.run(committed_position, run.lake, producer_id, run.endpoint_url))
    started = time.monotonic()
    with (
        Stopping() as stopping,
        Producer(run.lake, producer_id=producer_id, endpoint_url=run.endpoint_url) as producer,
    ):
        start = resumed(producer.position)
        shape = Shape(identity.slices, run.batch_size, run.seq_len, identity.ext)
        with showing(producer_id, len(files)) as show:

            def shown(position: TextPosition) -> None:
                if position.cursor is not None:
                    show(
                        position.steps, position.source_bytes, source.file_number(position.cursor.place.name)
                    )

            ending, position = feed(
                text_steps(source, tokenizer, shape, start),
                producer,
                start,
                stopping=stopping,
                steps_max=run.limit_steps,
                steps_per_second=run.steps_per_second,
                shown=shown,
            )
            producer.flush()
    summary = _Summary(
        run, identity, producer_id, start, position, ending, time.monotonic() - started, source
    )
    typer.echo(summary.as_json() if run.as_json else summary.as_line())
    return stopping.exit_code if ending is Ending.STOPPED else 0


def parse_shard(text: str) -> Shard:
    """`I/N` → the shard."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise UsageError(f"--shard {text}: write I/N, such as 0/2 and 1/2 for two producers")
    return Shard(int(index), int(count))


@dataclass(frozen=True, slots=True)
class _Summary:
    run: TextRun
    identity: LakeIdentity
    producer_id: str
    start: TextPosition
    end: TextPosition
    ending: Ending
    seconds: float
    source: TextSource

    def as_line(self) -> str:
        ended = {
            Ending.COMPLETE: "the source is exhausted",
            Ending.LIMIT: "the limit is reached",
            Ending.STOPPED: "stopped; run the same command again to continue",
        }[self.ending]
        return (
            f"{self.producer_id}: {self.end.steps - self.start.steps} steps in {self.seconds:.1f} s, all committed; "
            f"{self.end.steps} steps, {self.end.documents} documents, {self.end.source_bytes} source bytes in total; {ended}"
            + (f"; {len(self.source.skipped)} files without text skipped" if self.source.skipped else "")
        )

    def as_json(self) -> str:
        totals = ("steps", "rows", "tokens", "documents", "source_bytes")
        return json.dumps(
            {
                "lake": self.run.lake,
                "lake_id": self.identity.lake_id,
                "producer": self.producer_id,
                "shard": self.run.shard,
                "tokenizer": self.end.tokenizer,
                "ending": str(self.ending),
                "seconds": round(self.seconds, 3),
                "run": {name: getattr(self.end, name) - getattr(self.start, name) for name in totals},
                "total": {name: getattr(self.end, name) for name in totals},
                "skipped_files": len(self.source.skipped),
            }
        )
