"""`stepfs status`: the state of a lake, from its log, or of a mount, from its daemon."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from stepfs._internal import interruption
from stepfs._internal.clock import age_text, state_text
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import printable, size_text, table, time_text
from stepfs.cli.failure import is_a_log
from stepfs.cli.live import LINE_EVERY_S, Mark, print_above, watched
from stepfs.cli.options import EndpointUrl, Json, LakeOrDirectory
from stepfs.cli.target import is_lake
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepfs.format.control import GroupRecord
    from stepfs.format.node import NodeRecord
    from stepfs.format.planned import PlanStanding
    from stepfs.format.snapshot import LogState
    from stepfs.lake.log.reader import LogReader

_WATCH_S: Final = 1.0
_PRODUCERS: Final = ["PRODUCER", "EPOCH", "STEPS", "STATE", "LAST ENTRY"]
_SOURCES: Final = ["PRODUCER", "SOURCE", "TOKENS", "SHARE"]

Report = tuple[dict[str, object], list[str]]  # the document, and the same in lines for people


def status(
    target: LakeOrDirectory,
    as_json: Json = False,
    watch: Annotated[
        bool, Opt("--watch", "Show it again every second until interrupted; where there is no terminal, every 10 s.")
    ] = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Show the state of a lake or of a mount.

    Of a lake: head, frontier, producers, groups, sizes, and the latest records of the groups' mounts. Of a mount: the
    state of its daemon.
    """
    interruption.run(_status, target, as_json, watch, StoreOptions(endpoint_url))


async def _status(target: str, as_json: bool, watch: bool, store_options: StoreOptions) -> None:
    reports = _lake_reports(target, store_options) if is_lake(target) else _mount_reports(Path(target))
    drawn = watch and not as_json and not is_a_log(sys.stdout)
    shown, due_s = None, 0.0
    with watched(target) if drawn else nullcontext() as job:
        async with aclosing(reports):
            async for document, lines in reports:
                if job is not None:
                    job.update(Mark(counts_of(document), notes=lines))
                    if job.unseen:  # behind `nohup`: a watch that nobody can see is over
                        return
                    continue
                text = "\n".join(printable(line) for line in lines)
                block = json.dumps(document, indent=None if watch else 2) if as_json else text
                if block != shown and (as_json or time.monotonic() >= due_s):
                    print_above(block)
                    shown, due_s = block, time.monotonic() + LINE_EVERY_S
                if not watch:
                    return


def counts_of(document: Mapping[str, object]) -> dict[str, float]:
    """What grows, of a lake or of a mount."""
    if "pid" not in document:  # a lake
        return {"steps": _number(document, "next_step"), "bytes": _number(document, "total_bytes")}
    paths: dict[str, tuple[str, ...]] = {
        "steps read": ("last_step",),
        "bytes read": ("bytes_read",),
        "bytes fetched": ("data", "bytes_fetched"),
    }
    if document.get("last_step") is None:
        del paths["steps read"]  # none yet is no step 0
    return {name: _number(document, *path) for name, path in paths.items()}


async def _lake_reports(lake: str, store_options: StoreOptions) -> AsyncGenerator[Report, None]:
    import trio

    from stepfs.cli.target import opened_log, origin_stores
    from stepfs.lake.fleet import FleetLook

    async with (
        opened_log(lake, store_options, reads_only=True) as log,
        origin_stores(log.store, store_options) as origins,
    ):
        fleet = FleetLook(log.store, log.identity)
        while True:
            await log.control.refresh(lenient=True)
            groups = dict(sorted(log.control.record.holding.items()))
            nodes = await fleet.nodes(groups)
            problems = await origins.problems(log.state, log.first_live_step)
            document = lake_document(log, groups, nodes) | {"origins": _origins(log), "problems": problems}
            yield (
                document,
                [*_lake_lines(log, groups), *_node_lines(nodes), *(f"problem   {line}" for line in problems)],
            )
            await trio.sleep(_WATCH_S)
            await log.poll()


def lake_document(log: LogReader, groups: Mapping[str, GroupRecord], nodes: Sequence[NodeRecord]) -> dict[str, object]:
    """The stable JSON shape. An empty lake has head -1 and frontier -1; retired groups no longer count."""
    from stepfs.format.ids import JSON_SCHEMA

    state = log.state
    return {
        "schema": JSON_SCHEMA,
        "lake": redact_url(log.store.url),
        "lake_id": state.lake_id,
        "slices": state.slices,
        "grid": log.identity.grid.document(),
        "ext": log.identity.ext,
        "replica_of": log.identity.replica_of,
        "head": state.version,
        "digest": state.digest.hex(),
        "time": state.time_ms / 1000 if state.version >= 0 else None,
        "first_step": log.first_live_step,
        "next_step": state.next_step,
        "frontier": state.next_step - 1,
        "sealed": state.sealed,
        "total_bytes": state.total_bytes,
        "total_records": state.total_records,
        "live_bytes": log.live_bytes,
        "producers": _producers(state),
        "groups": {
            name: {"need": record.need, "kept": list(record.kept), "held_bytes": _held_bytes(log, record)}
            | {"held_for": record.replica or record.fork or None}
            for name, record in groups.items()
        },
        "paces": {name: record.need for name, record in sorted(log.control.record.paces.items())},
        "nodes": [_node_document(record) for record in nodes],
    }


def _producers(state: LogState) -> dict[str, Any]:
    """Every producer that ever committed; `plan` comes from its position if `stepfs-produce run` wrote it."""
    from stepfs.format.planned import read_plan_position

    plans = {name: read_plan_position(producer.position) for name, producer in state.producers.items()}
    return {
        producer.producer_id: {
            "epoch": producer.epoch,
            "writer": producer.writer,
            "next_seq": producer.next_seq,
            "version": producer.version,
            "time": producer.time_ms / 1000,
            "retired": producer.retired,
            "plan": None if (plan := plans[name]) is None else plan.document() | _begins(state, name, plan),
        }
        for name, producer in state.producers.items()
    }


def _begins(state: LogState, name: str, plan: PlanStanding) -> dict[str, int | bool | None]:
    """The lake's step from which on the producer's plan holds as it is. Only a lake that nobody else writes, or the newest
    steps, say it to the step; else it is that at which the producer would have been at its pace among the others.
    """
    if plan.since is None:
        return {"since_lake_step": None, "since_is_exact": False}
    made, seq = plan.step - plan.since, state.producers[name].next_seq
    mine = [entry.step for entry in state.tail if entry.producer_id == name]
    exact = True
    if seq == state.next_step:
        first = state.next_step - made
    elif made <= len(mine) and not state.origins:  # a fork may lack steps of its parent
        first = mine[-made]
    else:
        exact, newest = False, mine[-1] if mine else state.next_step - 1
        steps, own = (newest - mine[0], len(mine) - 1) if len(mine) > 1 else (state.next_step, max(seq, 1))
        first = newest - (made - 1) * steps // own
    return {"since_lake_step": max(first, 0), "since_is_exact": exact}


def _origins(log: LogReader) -> list[dict[str, object]]:
    cuts = log.state.origin_cuts
    return [{"url": one.url, "lake_id": one.lake_id, "cut": cuts[one.lake_id]} for one in log.state.origins]


def _held_bytes(log: LogReader, record: GroupRecord) -> int:
    """Payload bytes of the steps from the group's need on, by the mean of the live steps."""
    first, end = log.first_live_step, log.state.next_step
    held = end - max(first, min(record.need, end))
    return log.live_bytes * held // max(1, end - first)


def _node_document(record: NodeRecord) -> dict[str, object]:
    """`waited`, `causes`: share of the time in which a reader was blocked; `time`: by that machine's clock."""
    from stepfs.format.node import PERMILLE

    return {
        "group": record.group,
        "host": record.host,
        "directory": record.directory,
        "pid": record.pid,
        "stepfs": record.version,
        "frontier": record.frontier,
        "last_step": record.last_step,
        "waited_ratio": record.waited_permille / PERMILLE,
        "causes": {cause: part / PERMILLE for cause, part in record.causes},
        "time": record.time_ms / 1000,
        "stale": _is_stale(record),
    }


def _is_stale(record: NodeRecord) -> bool:
    """Whether the record is overdue: the mount was killed, its store is unreachable, or a clock is wrong."""
    from stepfs._internal.clock import SystemClock
    from stepfs.lake.fleet import FRESH_S

    return SystemClock().now_ms() - record.time_ms > 1000 * FRESH_S


def _node_lines(nodes: Sequence[NodeRecord]) -> Iterator[str]:
    """The mount whose readers waited most comes first."""
    from stepfs.doctor.waits import shares_text
    from stepfs.format.node import PERMILLE

    if not nodes:
        return

    def waited(record: NodeRecord) -> str:
        total = sum(part for _, part in record.causes) or record.waited_permille
        causes = shares_text({printable(cause): part / PERMILLE for cause, part in record.causes})
        return f"{100 * total / PERMILLE:.1f} %" + (f": {causes}" if causes else "")

    yield ""
    rows = [
        [
            printable(record.host),
            printable(record.directory),
            printable(record.group),
            str(record.frontier),
            "none" if record.last_step is None else str(record.last_step),
            waited(record),
            time_text(record.time_ms) + (" (stale)" if _is_stale(record) else ""),
        ]
        for record in sorted(nodes, key=lambda record: -record.waited_permille)
    ]
    yield from table(["HOST", "MOUNT", "GROUP", "FRONTIER", "LAST READ", "WAITED", "SEEN"], rows)


def _lake_lines(log: LogReader, groups: Mapping[str, GroupRecord]) -> Iterator[str]:
    from stepfs._internal.clock import SystemClock

    state = log.state
    live = state.next_step - log.first_live_step
    span = (
        f"{log.first_live_step}…{state.next_step - 1}" if live else "all reclaimed" if state.next_step else "none yet"
    )
    yield f"lake      {state.lake_id}  ({log.identity.grid}, {log.identity.ext}{', sealed' if state.sealed else ''})"
    if log.identity.replica_of is not None:
        yield f"copy of   {log.identity.replica_of}  ({'an archive' if log.identity.archive else 'a replica'})"
    for origin in _origins(log):
        yield f"fork of   {origin['url']}  (lake {origin['lake_id']}, the same below step {origin['cut']})"
    yield f"steps     {span}  ({live} live, {state.next_step} committed)"
    yield f"head      version {state.version}  ({time_text(state.time_ms)})"
    yield f"digest    {state.digest.hex()}"
    yield f"payload   {size_text(state.total_bytes)}, {state.total_records} records in all steps; {size_text(log.live_bytes)} live"
    producers, known = _producers(state), log.control.record
    yield from change_lines(producers, {name: one.need for name, one in (known.holding | known.paces).items()})
    yield from producer_lines(producers, SystemClock().now_ms())
    for name, record in sorted(log.control.record.paces.items()):
        yield f"pace      run {name} is at step {record.need}, {max(0, state.next_step - record.need)} steps behind"
    if groups:
        yield ""
        rows = [
            [
                f"{name} of {printable(url)}" if (url := record.replica or record.fork) else name,
                str(record.need),
                str(len(record.kept)),
                str(state.next_step - record.need),
                size_text(_held_bytes(log, record)),
            ]
            for name, record in groups.items()
        ]
        yield from table(["GROUP", "NEEDS FROM", "CHECKPOINTS", "STEPS BEHIND", "HOLDS ABOUT"], rows)


def producer_lines(producers: Mapping[str, Any], now_ms: int) -> Iterator[str]:
    """Below an empty line a table of `producers`, a part of a status document, then that of `plan_lines`."""
    rows = []
    for name, each in sorted(producers.items()):
        time_ms = round(each["time"] * 1000)
        state = state_text(time_ms, now_ms, retired=each.get("retired", False))
        rows.append([printable(name), str(each["epoch"]), str(each["next_seq"]), state, time_text(time_ms)])
    if rows:
        yield ""
        yield from table(_PRODUCERS, rows)
        yield from plan_lines(producers)


def plan_lines(producers: Mapping[str, Any]) -> Iterator[str]:
    """A table below those of `producers`, a part of a status document; nothing if none of them runs a plan.

    Sources with the most tokens come first.
    """
    from stepfs.format.planned import counts_shown

    rows = []
    plans = {producer: (each.get("plan") or {"sources": {}})["sources"] for producer, each in sorted(producers.items())}
    counted = counts_shown([source for sources in plans.values() for source in sources.values()])
    for producer, sources in plans.items():
        for name, source in sorted(sources.items(), key=lambda named: (-named[1]["tokens"], named[0])):
            counts = [str(source.get(count, 0)) for count in counted]
            share = f"{source['share']:.2%}"
            rows.append([printable(producer), printable(name), str(source["tokens"]), share, *counts])
    if rows:
        yield ""
        yield from table([*_SOURCES, *map(str.upper, counted)], rows)


def change_lines(producers: Mapping[str, Any], standing: Mapping[str, int]) -> Iterator[str]:
    """A line for each changed plan: from which step of the lake on it holds, and how far groups, at the steps `standing`, are
    before that.
    """
    for name, plan in ((name, each.get("plan") or {}) for name, each in sorted(producers.items())):
        if (first := plan.get("since_lake_step")) is None or producers[name].get("retired"):
            continue
        groups = {
            group: step for group, step in standing.items() if not group.startswith(":")
        }  # without replicas, forks
        before = [f"{group} is {first - step} before it" for group, step in sorted(groups.items()) if step < first]
        about = "" if plan["since_is_exact"] else "about "
        more = before or (["every group is behind it"] if groups else [])
        yield printable(
            f"changed   plan {plan['digest'][:8]} of {name} since {about}step {first}{''.join(f'; {one}' for one in more)}"
        )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


async def _mount_reports(directory: Path) -> AsyncGenerator[Report, None]:
    import trio

    from stepfs._internal.control_files import read_status
    from stepfs.errors import StepfsError
    from stepfs.mount.launch import explained

    before: Mapping[str, object] = {}
    while True:
        try:
            document = await trio.to_thread.run_sync(read_status, directory, abandon_on_cancel=True)
        except StepfsError as error:
            raise explained(directory, error) from error
        yield document, list(mount_lines(document, before))
        before = document
        await trio.sleep(_WATCH_S)


def mount_lines(now: Mapping[str, object], before: Mapping[str, object]) -> Iterator[str]:
    """A mount on one screen; its rates are those since `before`, or since its start. Fields may be missing."""
    from stepfs.doctor.waits import minute_of, wait_lines, waited_text

    data, cache, store = (_mapping(now.get(name)) for name in ("data", "cache", "store"))
    before = before if before.get("pid") == now.get("pid") else {}
    span_s = _number(now, "uptime_s") - _number(before, "uptime_s")

    def rate(*path: str) -> float:
        return max(0.0, _number(now, *path) - _number(before, *path)) / span_s if span_s > 0 else 0.0

    def size(*path: str) -> str:
        return f"{size_text(round(rate(*path)))}/s"

    opens = rate("data", "hits") + rate("data", "misses")
    hits = f"{100 * rate('data', 'hits') / opens:.1f} % of opens found their bytes" if opens else "no opens"
    trouble = "".join(f", {data[name]} {name}" for name in ("hedges", "retries", "corrupt") if data.get(name))
    held = [
        f"{size_text(round(_number(cache, f'{kind}_bytes')))} of {size_text(round(_number(cache, f'{kind}_limit_bytes')))}"
        for kind in ("memory", "disk")
    ]
    answers = "answers" if store.get("reachable") else "DOES NOT ANSWER"
    group = "without a group" if now.get("group") is None else f"group {now.get('group')}"
    yield f"{now.get('lake')}, {group}  (pid {now.get('pid')}, up {age_text(_number(now, 'uptime_s'))})"
    yield ""
    yield f"steps    {now.get('first_step')} to {now.get('frontier')}; last read {_shown(now.get('last_step'))}"
    waited = waited_text(now) if minute_of(now) else f"waited {100 * min(1.0, rate('waited_s')):.1f} % of the time"
    yield f"readers  {waited}; {now.get('waiting')} waiting for a commit, {now.get('open_files')} open files"
    yield from wait_lines(now)
    yield f"reading  {size('bytes_read')} through the daemon, {size('data', 'primed')} primed, {hits}"
    yield f"fetched  {size('data', 'bytes_fetched')} in {rate('data', 'requests'):.1f}/s GETs{trouble}"
    near = {name: _number(data, f"near_{name}") for name in ("hits", "absent", "corrupt", "failed")}
    if any(near.values()):
        yield (
            f"near     {size('data', 'near_bytes')} in {near['hits']:.0f} blocks; {near['absent']:.0f} absent, "
            f"{near['corrupt']:.0f} corrupt, {near['failed']:.0f} failed"
        )
    yield f"cache    {held[0]} in memory, {held[1]} on disk"
    yield f"store    {answers}, {rate('store', 'requests'):.1f}/s requests; trouble: {_shown(store.get('trouble'))}"


def _shown(value: object) -> object:
    return "none" if value is None else value


def _number(document: Mapping[str, object], *path: str) -> float:
    value: object = document
    for name in path:
        value = _mapping(value).get(name)
    return float(value) if isinstance(value, int | float) else 0.0
