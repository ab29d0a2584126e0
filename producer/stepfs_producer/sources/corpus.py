"""The listing of a source: its files, and their parts, so that fragments are enumerated without opening a file.

A listing is frozen at the first start, as shards of bytes under `<lake_id>/sources/<digest>/`. It has no
locations; `located` finds its files among those of today, and refuses by name a file that is gone or changed.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import closing
from dataclasses import replace
from typing import Final

from stepfs.errors import AbsentError, RefusedError
from stepfs.format.planned import CorpusFile, Listing
from stepfs_producer.sources.block import Unit
from stepfs_producer.sources.files.found import FoundFile, find_files
from stepfs_producer.sources.files.opened import head_of, open_file
from stepfs_producer.sources.formats import format_of
from stepfs_producer.sources.spec import SourceSpec

_ADVICE: Final = "restore it, or give the source a new name to begin it anew"


def located(listing: Listing, now: Listing, source: str, *, advice: str = _ADVICE) -> Listing:
    """`listing` with the locations of `now`. `RefusedError` names the first file that is gone or changed.

    Files that `now` has in addition are not part of it; they come with the next epoch.
    """
    present = {file.name: file for file in now.files}
    return Listing(tuple(_located(file, present.get(file.name), source, advice) for file in listing.files))


def located_files(spec: SourceSpec, listing: Listing, numbers: Collection[int], *, advice: str) -> Listing:
    """`listing` with the locations of some of its files, and of those beside them; only these are opened. As `located`."""
    names = {listing.files[number].name for number in numbers}
    names |= {format_of(spec).beside(name) for name in names}
    found = {file.name: _inspected(spec, file) for file in _found(spec) if file.name in names}
    return Listing(
        tuple(
            _located(file, found.get(file.name), spec.name, advice) if file.name in names else file
            for file in listing.files
        )
    )


def list_corpus(spec: SourceSpec) -> Listing:
    """List the files of a source as they are now. Footers, indices and the beginnings of local files are read.

    `UsageError`, `AbsentError` and `RefusedError` say which entry or file is wrong; `AbsentError` if there is no record.
    """
    files = tuple(_inspected(spec, file) for file in _found(spec))
    if not any(_has_records(format_of(spec).unit(file.name), file) for file in files):
        what = "all its files are empty" if files else f"it has no file of the format {spec.format}"
        raise AbsentError(f"source {spec.name}: {what}; name files with records, or leave the source out")
    return Listing(files)


def _found(spec: SourceSpec) -> list[FoundFile]:
    rule = format_of(spec)
    entries = rule.entries(spec.files)
    return rule.choose(find_files(entries, rule.suffixes, endpoint_url=spec.endpoint_url, profile=spec.profile))


def _has_records(unit: Unit, file: CorpusFile) -> bool:
    if unit is Unit.PARTS:
        return any(records for records, _ in file.parts)
    return unit is not Unit.NONE and file.size > 0


def _inspected(spec: SourceSpec, found: FoundFile) -> CorpusFile:
    with closing(open_file(spec, found.location, found.size, etag=found.etag)) as file:
        head = "" if found.etag else head_of(file)
        parts = tuple(format_of(spec).parts(spec, file))
    return CorpusFile(found.name, found.size, found.etag, head, parts, found.location)


def _located(file: CorpusFile, now: CorpusFile | None, source: str, advice: str) -> CorpusFile:
    if now is None:
        raise RefusedError(f"source {source}: the file {file.name} is gone; {advice}")
    if now.frozen == file.frozen:
        return replace(file, location=now.location)
    if now.size != file.size:
        changed = f"is {'shorter' if now.size < file.size else 'longer'} than when this plan began"
    elif now.etag != file.etag:
        changed = "was replaced since this plan began (its etag differs)"
    else:
        changed = "begins otherwise than when this plan began"
    raise RefusedError(f"source {source}: {now.location} {changed}; {advice}")
