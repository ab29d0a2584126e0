"""What one check found."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # works, but slower or with less than it could have
    FAIL = "FAIL"  # something that was asked for will not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `exit_code` counts only for a FAIL."""

    level: Level
    subject: str
    detail: str
    remedy: str = ""
    exit_code: int = 1


def ok(subject: str, detail: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, subject, detail)


def note(subject: str, detail: str, remedy: str) -> Finding:
    """Works all the same; `remedy` says what would make it better."""
    return Finding(Level.NOTE, subject, detail, remedy)


def fail(subject: str, detail: str, remedy: str, *, exit_code: int = 1) -> Finding:
    """Does not work; `remedy` says what to do."""
    return Finding(Level.FAIL, subject, detail, remedy, exit_code)
