"""What must hold when everything is quiet: nothing missing, nothing doubled, nothing kept that nobody needs."""

from __future__ import annotations

from doubles.faulty_store import ObjectMap
from ledger import Ledger

from stepfs.format.codec import Kind, decode
from stepfs.format.ids import Version
from stepfs.format.keys import (
    LAKE,
    control_prefix,
    data_prefix,
    index_prefix,
    log_prefix,
    number_of,
    segment_of,
    snapshot_prefix,
)
from stepfs.lake.log.reader import LogReader


def audit(ledger: Ledger, totals: dict[str, int], reader: LogReader) -> None:
    """After the last reclaim. `reader` was opened after everything settled: what a stranger sees."""
    shared, lake_id = ledger.shared, ledger.identity.lake_id
    ledger.require(
        ledger.published == {n: t for n, t in totals.items() if t}, f"published {ledger.published} of {totals}"
    )
    ledger.require(reader.state.digest == ledger.state.digest, "a fresh reader ends at another digest than the log")
    ledger.require(
        (reader.state.next_step, dict(reader.state.producers))
        == (ledger.state.next_step, dict(ledger.state.producers)),
        "a fresh reader folds the log to another state",
    )
    live = ledger.steps[ledger.first_live_step :]
    uploads = _names(shared, data_prefix(lake_id))
    if ledger.era:  # what came late of an epoch that the log has lost is no orphan that anybody can tell
        uploads &= {entry.tgb.key for entry in live}
    _same(ledger, "data", uploads, {entry.tgb.key for entry in live})
    versions = range(ledger.floor_version, ledger.state.version + 1)
    _same(ledger, "log", _names(shared, log_prefix(lake_id)), {ledger.head_key(v) for v in versions})
    _snapshots(ledger, _names(shared, snapshot_prefix(lake_id)))
    segments = {segment_of(index_prefix(lake_id), key) for key in _names(shared, index_prefix(lake_id))}
    first, end = ledger.first_live_step // ledger.segment_steps, len(ledger.steps) // ledger.segment_steps
    ledger.require(
        all(segment is not None and first <= segment < end for segment in segments),
        f"index segments {segments} are kept; {first}…{end - 1} make sense",
    )
    numbers = [number_of(control_prefix(lake_id), key) for key in sorted(_names(shared, control_prefix(lake_id)))]
    ledger.require(numbers == list(range(len(numbers))), f"control records {numbers} are not dense")
    known = {key for key in shared.objects if key.startswith(f"{lake_id}/")} | {LAKE}
    strays = {key for key in shared.objects if key not in known and not key.startswith("probe/")}
    ledger.require(not strays, f"objects outside the lake: {strays}")


def _snapshots(ledger: Ledger, keys: set[str]) -> None:
    """None below the floor, and one that a stranger can start from if the log does not begin at 0."""
    prefix = snapshot_prefix(ledger.identity.lake_id)
    usable = 0
    for key in keys:
        version = number_of(prefix, key)
        assert version is not None
        ledger.require(version >= ledger.floor_version, f"{key} is kept; the floor is {ledger.floor_version}")
        digest = decode(Kind.SNAPSHOT, ledger.shared.objects[key], key).binary("digest")
        usable += ledger.digests[Version(version)] == digest
    ledger.require(
        usable >= 2 or ledger.floor_version == 0, f"{usable} snapshots are left to start from; one may be damaged"
    )


def _names(shared: ObjectMap, prefix: str) -> set[str]:
    return {entry.key for entry in shared.select(prefix, "", None)}


def _same(ledger: Ledger, what: str, found: set[str], wanted: set[str]) -> None:
    ledger.require(not wanted - found, f"{what}: lost {sorted(wanted - found)[:3]}")
    ledger.require(not found - wanted, f"{what}: nobody needs {sorted(found - wanted)[:3]}")
