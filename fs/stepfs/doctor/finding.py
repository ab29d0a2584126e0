"""The result of one check."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"  # works, but slower or with fewer features
    FAIL = "FAIL"  # a requested feature will not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `exit_code` counts only for a FAIL."""

    level: Level
    subject: str
    detail: str
    remedy: str = ""
    exit_code: int = 1


def ok(subject: str, detail: str) -> Finding:
    """A finding without a problem."""
    return Finding(Level.OK, subject, detail)


def note(subject: str, detail: str, remedy: str) -> Finding:
    """A finding that only limits; `remedy` would improve it."""
    return Finding(Level.NOTE, subject, detail, remedy)


def fail(subject: str, detail: str, remedy: str, *, exit_code: int = 1) -> Finding:
    """A failure; `remedy` corrects it."""
    return Finding(Level.FAIL, subject, detail, remedy, exit_code)
