"""The report at the end of a run of `stepfs-produce text`: a line, or a JSON document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stepfs.cli.columns import printable
from stepfs.format.ids import JSON_SCHEMA
from stepfs_producer.cli.feed import Ending
from stepfs_producer.text.steps import TextPosition

_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class TextSummary:
    """One run, ended."""

    lake: str
    lake_id: str
    producer_id: str
    start: TextPosition
    end: TextPosition
    ending: Ending
    seconds: float
    skipped: int  # files without text that were met
    passed: int  # records of other shards that were met
    late: int  # files added before the one where the producer stands
    grown: Sequence[str]  # files that grew after they were finished

    def warnings(self) -> list[str]:
        """Results without an error that the user hardly wanted."""
        if self.ending is not Ending.COMPLETE or self.end.steps or not self.passed:
            return []
        line = (
            f"shard {self._shard} holds none of the {self.passed} records of the source, so its producer made no step: "
            "a hash of its name says which shard a record (a line of .jsonl, or up to 1 MiB of a file) belongs to, and "
            "few records may all belong to others; nothing is lost. Give so small a source to one producer "
            "(--shard 0/1) of a new lake"
        )
        return [line]

    def as_line(self) -> str:
        ended = {
            Ending.COMPLETE: "the source is exhausted",
            Ending.LIMIT: "the limit is reached",
            Ending.STOPPED: "stopped; run the same command again to continue",
        }[self.ending]
        return (
            f"{self.producer_id}: {self.end.steps - self.start.steps} steps in {self.seconds:.1f} s, all committed; "
            f"{self.end.steps} steps, {self.end.documents} documents, {self.end.source_bytes} source bytes in total; {ended}"
            + (f"; {self.skipped} files without text skipped" if self.skipped else "")
            + self._late_line()
            + self._grown_line()
        )

    def as_json(self) -> str:
        totals = ("steps", "rows", "tokens", "documents", "source_bytes")
        return json.dumps(
            {
                "schema": JSON_SCHEMA,
                "lake": self.lake,
                "lake_id": self.lake_id,
                "producer": self.producer_id,
                "shard": self._shard,
                "tokenizer": self.end.tokenizer,
                "ending": str(self.ending),
                "seconds": round(self.seconds, 3),
                "run": {name: getattr(self.end, name) - getattr(self.start, name) for name in totals},
                "total": {name: getattr(self.end, name) for name in totals},
                "skipped_files": self.skipped,
                "late_files": self.late,
                "grown_files": list(self.grown),
                "warnings": self.warnings(),
            }
        )

    @property
    def _shard(self) -> str:
        return f"{self.end.shard.index}/{self.end.shard.count}"

    def _late_line(self) -> str:
        if not self.late or self.end.cursor is None:
            return ""
        files = "1 file was" if self.late == 1 else f"{self.late} files were"
        are = "is" if self.late == 1 else "are"
        place = printable(self.end.cursor.place.name)
        return f"; {files} added before {place}, where this producer stands, and {are} not read"

    def _grown_line(self) -> str:
        if not self.grown:
            return ""
        files = "1 file" if len(self.grown) == 1 else f"{len(self.grown)} files"
        more = len(self.grown) - _NAMES_SHOWN
        names = ", ".join(map(printable, self.grown[:_NAMES_SHOWN])) + (
            f" and {more} more" if more > 0 else ""
        )
        return f"; {files} grew after they were finished, and what was added is not read: {names}"
