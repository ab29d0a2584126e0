"""The commands of `stepfs-produce`. They import the library inside their functions, so help is immediate."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from stepfs._internal.declared_option import Opt
from stepfs.cli.failure import expect_document, log_as_json, reported
from stepfs.cli.live import progress
from stepfs.cli.options import EndpointUrl, Json, Lake, PlanDirectory, not_empty, with_options
from stepfs.cli.program import new_program
from stepfs.cli.target import check_order, is_lake
from stepfs.errors import AbsentError, UsageError
from stepfs.format.arguments import parse_log_format
from stepfs.store.api import StoreOptions
from stepfs_producer.plan.packages import plan_packages
from stepfs_producer.run.options import RunOptions, TextOptions

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="The plan: a YAML file.", callback=not_empty)]
Holdout = Annotated[
    bool, Opt("--holdout", "Take the records that the plan holds out; a run needs a lake of their own.")
]
Workers = Annotated[
    int | None, Opt("--workers", "Processes that read and tokenise; one per core by default.", "N", least=1)
]
LogFormat = Annotated[
    str,
    Opt(
        "--log-format",
        "Of the lines on stderr: text, or json, one object each.",
        "FORMAT",
        parse_log_format,
        environ=True,
    ),
]

_PLACE: Final = re.compile(r"(.*?)(?::([0-9]{1,9})(?::([0-9]{1,9}))?)?", re.DOTALL)
app = new_program(
    "stepfs-produce",
    "Turn data into global training steps, each in exactly one commit, across kills and restarts.",
    "0 the source is exhausted or the limit reached, 1 failure, 2 usage, 3 absent, 4 refused, 5 corrupt, 6 store "
    "unreachable, 7 fenced (do not restart), 8 a step differs (replay), 130 or 143 stopped by SIGINT or SIGTERM (restart to continue)",
)


def run(
    plan: PlanFile,
    lake: Lake,
    *,
    holdout: Holdout = False,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
    log_format: LogFormat = "text",
    trace: Annotated[
        Path | None,
        Opt("--trace", "Write what the run does to this file, as Chrome's trace events (.gz: packed).", "FILE"),
    ] = None,
    values: Annotated[dict[str, Any], RunOptions],
) -> None:
    """Run PLAN into LAKE, created when absent; run again after any ending, it continues exactly."""
    if log_format == "json":
        log_as_json()
    check_order(lake, plan, "stepfs-produce", "run", lake, plan)
    options = RunOptions(lake, **values, store_options=StoreOptions(endpoint_url))
    with nullcontext() if trace is None else _traced(trace):
        with progress(f"{options.producer_id} into", lake) as job:  # before what takes a second to import
            from stepfs_producer.cli.reports import report_run, run_shown
            from stepfs_producer.run.prepare import plan_at

            place = plan_at(Path(plan), held_out=holdout)
            result, code = run_shown(place, options, job)
        report_run(place, result, as_json=as_json)
    if code:
        raise typer.Exit(code)


def _traced(path: Path) -> AbstractContextManager[object]:
    from stepfs.reader.tracing import trace

    return trace(path)


def check(
    plan: PlanFile,
    lake: Annotated[
        str | None,
        typer.Argument(
            metavar="[LAKE]", help="Compare this lake with the plan, too.", callback=not_empty, show_default=False
        ),
    ] = None,
    *,
    producer_id: Annotated[
        str, Opt("--producer-id", "The producer id of the run to compare with LAKE.", "ID")
    ] = "plan",
    accept_changes: Annotated[bool, Opt("--accept-changes", "Compare as a run with this option does.")] = False,
    holdout: Holdout = False,
    no_sources: Annotated[
        bool, Opt("--no-sources", "Look at the text of the plan alone: open no file, import no function.")
    ] = False,
    deep: Annotated[bool, Opt("--deep", "Read and transform every record, and name the bad ones.")] = False,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Report every mistake in PLAN with its line, then shares, files, bytes, epochs, slices and memory. Writes nothing.

    With LAKE: refuse what a run would refuse before it starts.
    """
    from stepfs_producer.cli.reports import check_plan

    if lake is not None:
        check_order(lake, plan, "stepfs-produce", "check", lake, plan)
    if deep and no_sources:
        raise UsageError("--deep reads the sources; leave out --no-sources, or --deep")
    if lake is not None and no_sources:
        raise UsageError("a lake is compared with sources, too; leave out --no-sources, or LAKE")
    options = None
    if lake is not None:
        at = StoreOptions(endpoint_url)
        options = RunOptions(lake, producer_id=producer_id, accept_changes=accept_changes, store_options=at)
    typer.echo(check_plan(Path(plan), options, held_out=holdout, sources=not no_sources, deep=deep, as_json=as_json))


def keys(
    as_json: Annotated[bool, Opt("--json", "Print the JSON Schema of plan files, for editors.")] = False,
) -> None:
    """Print every key of plan files with its meaning and its default."""
    from stepfs_producer.cli.reports import keys_text, schema_text

    typer.echo(schema_text() if as_json else keys_text())


def simulate(
    plan: PlanFile,
    limit_steps: Annotated[int, Opt("--limit-steps", "Plan the first N steps, or to the end.", "N", least=1)] = 100,
    workers: Workers = None,
    holdout: Holdout = False,
    as_json: Json = False,
) -> None:
    """Plan the first steps of PLAN over its real records, without a lake: shares, fill, balance, padding, planning time."""
    from stepfs_producer.cli.reports import simulation_report

    typer.echo(simulation_report(Path(plan), steps=limit_steps, workers=workers, held_out=holdout, as_json=as_json))


def find(
    lake: Lake,
    source: Annotated[str, Opt("--source", "Name of the source in the plan.", "NAME")],
    file: Annotated[str, Opt("--file", "The file, as `stepfs-produce lineage` prints it.", "FILE")],
    record: Annotated[
        int,
        Opt(
            "--record",
            "Where the record begins: byte of the file, row of Parquet, number of a document.",
            "N",
            least=0,
        ),
    ],
    plan_dir: PlanDirectory = ".",
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Find the steps of LAKE that hold a record, in every epoch. The other way round: `stepfs-produce lineage`."""
    from stepfs_producer.cli.reports import find_report

    report = find_report(lake, StoreOptions(endpoint_url), source, file, record, plan_dir=plan_dir, as_json=as_json)
    typer.echo(report)


def lineage(
    target: Annotated[
        str,
        typer.Argument(
            metavar="LAKE|PATH[:MICRO[:TOKEN]]",
            help="A lake, a step of a mount, or a file there: all of it, one of its micro-batches, or a token of that.",
            callback=not_empty,
        ),
    ],
    step: Annotated[int | None, Opt("--step", "Of a lake; the newest by default.", "N", least=0)] = None,
    rank: Annotated[
        str | None,
        Opt(
            "--rank",
            "Of a lake: a data rank, one of its micro-batches, or a token; by default the whole step.",
            "R[:MICRO[:TOKEN]]",
        ),
    ] = None,
    text: Annotated[bool, Opt("--text", "Show the records, where their files are at hand and the same.")] = False,
    plan_dir: PlanDirectory = ".",
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show which records stand in a step: source, file, record, epoch and tokens of each.

    Reads the spans in the files themselves, and the lake's list of each source's files. The other way round, from a
    record to its steps: `find`.
    """
    from stepfs_producer.cli.lineage_report import LineageQuery, lineage_report, place_of
    from stepfs_producer.run.history.lineage import Wanted

    options = StoreOptions(endpoint_url)
    if is_lake(target):
        whose, micro, token = _parted(rank or "")
        if whose and not whose.isdigit():
            raise UsageError(f"--rank {rank!r}: write a rank, and if need be micro-batch and token: 3 or 3:0:512")
        asked = LineageQuery(target, options, Wanted(step, int(whose) if whose else None, micro, token))
    else:
        for option, given in (("--step", step), ("--rank", rank)):
            if given is not None:
                from stepfs.store.opening import meant_url

                raise UsageError(f"{option} is for lakes; {target} is a path: of a lake write {meant_url(target)}")
        path, micro, token = _parted(target)
        asked = place_of(path, options, micro, token)
    printed, why = lineage_report(asked, plan_dir if text else None, as_json=as_json)
    typer.echo(printed)
    expect_document(False)
    if text and why:
        raise AbsentError(why)


def view(
    target: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|LAKE|FILE",
            help="A plan's YAML file, a lake, or a file of a mount or of a plan.",
            callback=not_empty,
        ),
    ],
    step: Annotated[int | None, Opt("--step", "Of a lake; the newest by default.", "N", least=0)] = None,
    rank: Annotated[int | None, Opt("--rank", "Of a lake: a data rank; 0 by default.", "R", least=0)] = None,
    micro: Annotated[int | None, Opt("--micro", "One micro-batch; all by default.", "M", least=0)] = None,
    source: Annotated[str | None, Opt("--source", "Documents of this source alone.", "NAME")] = None,
    samples: Annotated[int | None, Opt("--samples", "Of a plan: N of each source; 3 by default.", "N", least=1)] = None,
    ids: Annotated[bool, Opt("--ids", "Show token ids beside the text.")] = False,
    full: Annotated[bool, Opt("--full", "Show long texts whole.")] = False,
    holdout: Holdout = False,
    plan_dir: PlanDirectory = ".",
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show what the model reads: documents as text, each token coloured, or marked [[so]], where the loss looks at it.

    Of a plan: the first samples of each source, before any run. Of a lake or a file: its rows, with the tokenizer that the
    lake's plan names.
    """
    from stepfs.payload import last_suffix
    from stepfs_producer.cli.lineage_report import LineageQuery, place_of
    from stepfs_producer.cli.view_report import ViewOptions, view_file, view_lake, view_plan
    from stepfs_producer.run.history.lineage import Wanted
    from stepfs_producer.run.view import KINDS

    how, at, lakes = ViewOptions(source, ids, full, as_json), StoreOptions(endpoint_url), is_lake(target)
    is_file = not lakes and (last_suffix(target) in KINDS or Path(target).is_dir())
    of_plan = not lakes and not is_file
    of_one = {"--step": (step, lakes), "--rank": (rank, lakes), "--micro": (micro, not of_plan)}
    for option, (given, fits) in (of_one | {"--samples": (samples, of_plan)}).items():
        if given is not None and not fits:
            raise UsageError(f"{option} is for {'plans' if option == '--samples' else 'lakes'}; {target} is none")
    if of_plan:
        view_plan(Path(target), samples or 3, how, held_out=holdout)
    elif lakes:
        view_lake(LineageQuery(target, at, Wanted(step, rank or 0, micro)), plan_dir, how)
    else:
        try:
            asked = place_of(target, at, micro, None)
        except UsageError:
            if Path(target).is_dir():
                raise
            view_file(Path(target), micro, how)
        else:
            if asked.wanted.slice is None:
                raise UsageError(f"{target} is a step of several ranks; name a file of it, such as rank-00000.pt")
            view_lake(asked, plan_dir, how)


def report(
    target: Annotated[
        str, typer.Argument(metavar="PLAN|LAKE", help="A plan's YAML file, or a lake.", callback=not_empty)
    ],
    out: Annotated[
        Path | None, Opt("--out", "The file to write, which replaces one of that name: one HTML page.", "FILE")
    ] = None,
    no_text: Annotated[bool, Opt("--no-text", "Show no rows of training text.")] = False,
    limit_steps: Annotated[
        int | None, Opt("--limit-steps", "Of a plan: plan the first N steps; 100 by default.", "N", least=1)
    ] = None,
    capacity: Annotated[
        str | None,
        Opt("--capacity", "Of a lake: what its bucket may hold in all, for the day when it is full.", "SIZE"),
    ] = None,
    holdout: Holdout = False,
    plan_dir: PlanDirectory = ".",
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Draw what a plan gives or how a lake stands, as one page for a browser: no network, no script.

    Of a plan, before any run: shares beside the mix, tokens, epochs, bad records, lengths, fill, balance, and rows as text. Of
    a lake the same from some of its steps, which the page names, and commits, readers, checkpoints, sizes and a forecast.
    """
    from stepfs.format.arguments import parse_size
    from stepfs_producer.cli.report_command import report_lake, report_plan

    lakes = is_lake(target)
    of_one = {
        "--limit-steps": (limit_steps, not lakes),
        "--holdout": (holdout or None, not lakes),
        "--capacity": (capacity, lakes),
    }
    for option, (given, fits) in of_one.items():
        if given is not None and not fits:
            raise UsageError(f"{option} is for {'plans' if lakes else 'lakes'}; {target} is none")
    if out is None and not as_json:
        raise UsageError("the page needs a name: add --out report.html, or --json for the figures")
    if lakes:
        held = None if capacity is None else parse_size(capacity)
        at = StoreOptions(endpoint_url)
        report_lake(target, at, plan_dir, held, out, text=not no_text, as_json=as_json)
    else:
        report_plan(Path(target), limit_steps or 100, out, held_out=holdout, text=not no_text, as_json=as_json)


def _parted(text: str) -> tuple[str, int | None, int | None]:
    match = _PLACE.fullmatch(text)
    assert match is not None
    return match[1], *(None if number is None else int(number) for number in match.groups()[1:])  # type: ignore[return-value]


def replay(
    lake: Lake,
    steps: Annotated[str, Opt("--steps", "Steps A to B-1, by the lake's numbers.", "A:B")],
    to: Annotated[Path | None, Opt("--to", "Write them there instead, named as in a mount.", "DIR")] = None,
    ranks: Annotated[
        str | None, Opt("--ranks", "Make the files of these data ranks only; all are planned.", "R,S-T")
    ] = None,
    producer_id: Annotated[
        str | None, Opt("--producer-id", "Only the steps of this producer, where several made them.", "ID")
    ] = None,
    plan_dir: PlanDirectory = ".",
    workers: Workers = None,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Make steps of LAKE again, from its plan, its lists of files and the files themselves, and compare every byte.

    Exit code 8 if a step differs; each difference is named, and libraries that are not those of then.
    """
    from stepfs.view.ranks import parse_ranks, parse_steps
    from stepfs_producer.cli.reports import replay_and_report
    from stepfs_producer.run.history.replay import ReplayOptions

    options = ReplayOptions(
        lake,
        parse_steps(steps),
        producer_id=producer_id,
        ranks=None if ranks is None else parse_ranks(ranks),
        to=to,
        directory=plan_dir,
        workers=workers,
    )
    if code := replay_and_report(options, StoreOptions(endpoint_url), as_json=as_json):
        raise typer.Exit(code)


def text(
    lake: Lake,
    *,
    inputs: Annotated[
        list[str],
        Opt(
            "--input",
            "File, directory, glob, or s3://, gs:// or az:// URL of text or of .jsonl (.gz, .zst too); repeatable.",
            "PATH",
            short="-i",
        ),
    ],
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
    log_format: LogFormat = "text",
    values: Annotated[dict[str, Any], TextOptions],
) -> None:
    """Pack text into steps of LAKE, created when absent; run again after any ending, it continues exactly.

    Documents stand end to end in the order of the files, and every one is in exactly one step; the last step is padded. Files
    must not change meanwhile. For everything else, such as several sources or shuffling, write a plan: `stepfs-produce run`.
    """
    from stepfs_producer.cli.reports import report_run, run_shown
    from stepfs_producer.cli.text_plan import parsed_shard, shape_of_lake, text_plan
    from stepfs_producer.run.prepare import LocatedPlan
    from stepfs_producer.sources.hub import with_commits

    if log_format == "json":
        log_as_json()
    options = TextOptions(**values)
    index, count = parsed_shard(options.shard)
    store_options = StoreOptions(endpoint_url)
    shape = shape_of_lake(lake, options.slices, options.ext, store_options)
    plan = text_plan(inputs, shape, options, endpoint_url)
    run_options = RunOptions(
        lake,
        producer_id=options.producer_id or f"text-{index}-of-{count}",
        workers=options.workers,
        memory=options.memory,
        max_lead=None,
        limit_steps=options.limit_steps,
        accept_changes=options.accept_changes,
        seal=options.seal,
        fixed_shape=True,
        store_options=store_options,
    )
    place = LocatedPlan(with_commits(plan))
    with progress(f"{run_options.producer_id} into", lake) as job:
        result, code = run_shown(place, run_options, job)
    report_run(place, result, as_json=as_json)
    if code:
        raise typer.Exit(code)


def tokenize(
    plan: PlanFile,
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="Prefix of the files: OUT.bin and OUT.idx.", callback=not_empty)
    ],
    source: Annotated[str, Opt("--source", "Name of the source in the plan.", "NAME")],
    workers: Workers = None,
    holdout: Holdout = False,
    as_json: Json = False,
) -> None:
    """Write the documents of a source of PLAN, as token ids, to the two files of Megatron: tokenised once for many mixes.

    A source with `format: megatron` and `files: OUT` reads them; it needs the same tokenizer in its plan.
    """
    from stepfs_producer.cli.reports import tokenize_report

    if "://" in out:
        raise UsageError(f"{out}: OUT is a local path; copy the two files from there")
    report = tokenize_report(Path(plan), Path(out), source=source, workers=workers, held_out=holdout, as_json=as_json)
    typer.echo(report)


for command in (run, check, keys, simulate, view, report, lineage, find, replay, text, tokenize):
    app.command(command.__name__)(reported("stepfs-produce")(plan_packages()(with_options(command))))
