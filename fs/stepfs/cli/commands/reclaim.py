"""`stepfs reclaim`: delete the steps that no kept checkpoint may need, once or repeatedly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from stepfs._internal import interruption
from stepfs._internal.declared_option import Opt
from stepfs.cli.columns import json_text, size_text
from stepfs.cli.failure import is_a_log, say
from stepfs.cli.live import Mark, print_above, progress
from stepfs.cli.options import EndpointUrl, Json, Lake
from stepfs.cli.target import opened_store, origin_stores
from stepfs.errors import StoreUnreachableError, UsageError
from stepfs.mount.redact import redact_url
from stepfs.store.api import StoreOptions

if TYPE_CHECKING:
    from stepfs.lake.reclaim.run import Report

_INTERVAL_S_MIN: Final = 0.1
_GRACE_S_MAX: Final = 365 * 24 * 3600.0


def reclaim(
    lake: Lake,
    dry_run: Annotated[bool, Opt("--dry-run", "Count what would be deleted; change nothing.")] = False,
    every: Annotated[str | None, Opt("--every", "Again and again, such as 60s.", "DURATION", environ=True)] = None,
    max_percent: Annotated[
        float,
        Opt(
            "--max-percent",
            "Refuse if more than P % of the live steps would go at once.",
            "P",
            least=0.0,
            most=100.0,
            environ=True,
        ),
    ] = 100.0,
    grace: Annotated[
        str,
        Opt(
            "--grace",
            "A group's need of this long ago still counts: the time to take back a wrong checkpoint.",
            "DURATION",
            environ=True,
        ),
    ] = "1h",
    as_json: Json = False,
    endpoint_url: EndpointUrl = None,
) -> None:
    """Delete steps, and leftovers of dead producers, behind the oldest kept checkpoint of every group.

    Nothing is deleted before the checkpoint that released it is as old as --grace, by the store's own clock. Safe to
    kill at any moment and to run in several places at once. Without a group nothing is deleted.
    """
    import trio

    from stepfs.lake.identity import open_lake
    from stepfs.lake.reclaim.run import Reclaimer

    interval_s, grace_s = _seconds(every, grace)
    options = StoreOptions(endpoint_url)

    def note(whole_bytes: int, objects: int, size: int) -> None:
        job.update(Mark({"bytes": size, "objects": objects}, whole_bytes or None))

    async def work() -> tuple[Report, str]:
        async with opened_store(lake, options) as store, origin_stores(store, options) as origins:
            reclaimer: Reclaimer | None = None
            while True:
                try:
                    identity = await open_lake(store)
                    if reclaimer is None or reclaimer.identity != identity:
                        reclaimer = Reclaimer(
                            store, identity, origins=origins, max_percent=max_percent, grace_s=grace_s, note=note
                        )
                    report = await reclaimer.run(dry_run=dry_run)
                    if interval_s is None:
                        return report, identity.lake_id
                    _show(report, lake, identity.lake_id, dry_run=dry_run, as_json=as_json)
                except StoreUnreachableError as error:
                    if interval_s is None:
                        raise
                    say(f"stepfs: {error}; trying again in {interval_s:g} s")
                await trio.sleep(interval_s)

    # One that goes on has a line of its own for each run.
    with progress("reclaim", lake, quiet=as_json or (interval_s is not None and is_a_log())) as job:
        report, lake_id = interruption.run(work)
    _show(report, lake, lake_id, dry_run=dry_run, as_json=as_json)


def _seconds(every: str | None, grace: str) -> tuple[float | None, float]:
    from stepfs.format.arguments import parse_duration

    interval_s, grace_s = None if every is None else parse_duration(every), parse_duration(grace)
    if interval_s is not None and interval_s < _INTERVAL_S_MIN:
        raise UsageError(f"--every {every}: use at least {_INTERVAL_S_MIN:g}s, better 60s")
    if grace_s > _GRACE_S_MAX:
        raise UsageError(f"--grace {grace}: use at most {_GRACE_S_MAX / 3600:g}h")
    return interval_s, grace_s


def _show(report: Report, lake: str, lake_id: str, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        deleted = {"objects": report.deleted_objects, "bytes": report.deleted_bytes}
        facts = {
            "lake": redact_url(lake),
            "lake_id": lake_id,
            "floor": report.floor,
            "first_live_step": report.first_live_step,
            "deleted": deleted,
        }
        more = {"reason": report.reason, "dry_run": dry_run}
        print_above(json_text(facts | more, indent=None))
        return
    verb = "would delete" if dry_run else "deleted"
    print_above(
        f"{verb} {report.deleted_objects} objects ({size_text(report.deleted_bytes)}); "
        f"live from step {report.first_live_step}, log from version {report.floor} ({report.reason})"
    )
