"""The options of one mount: parsed, checked, frozen, and sent to the daemon's process as JSON.

They contain no credentials: these come from the AWS chain in the environment, which the daemon inherits.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from stepfs.data.fetch.concurrency import CONNECTIONS_MAX
from stepfs.errors import UsageError
from stepfs.format.ids import Step
from stepfs.store.options import StoreOptions
from stepfs.view.naming import RANK_MAX, STEP_MAX

_DURATION: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h|)")
_SECONDS: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}

DEADLINE_S: Final = 300.0
INTERVAL_S_MIN: Final = 0.001


@dataclass(frozen=True, slots=True)
class MountOptions:
    """Every option of `stepfs mount`. Sizes in bytes, times in seconds, steps half-open."""

    lake: str
    directory: Path
    endpoint_url: str | None = None
    ranks: tuple[int, ...] | None = None  # a hint for prefetching; hides nothing
    world: int | None = None
    mesh: str | None = None
    steps: range | None = None
    wait_s: float | None = None
    stat_waits: bool = False  # under `steps`: names and attributes of future steps wait, too
    group: str | None = None
    cache_dir: Path | None = None
    cache_bytes: int | None = None  # on disk under `cache_dir`; without one, in memory
    memory_bytes: int | None = None
    prefetch_steps: int | None = None
    connections: int = CONNECTIONS_MAX  # concurrent GETs of data, at most
    poll_s: float = 0.1
    show_last: int | None = None
    checkpoint_dir: str | None = None  # a directory, or a path with {N} in it
    next_step: str = "N"
    trust_checkpoints: bool = False  # record checkpoints that no reader has reached, too
    allow_other: bool = False
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    prime: bool = True
    deadline_s: float = DEADLINE_S

    @property
    def store_options(self) -> StoreOptions:
        """How this mount reaches its stores."""
        return StoreOptions(self.endpoint_url, self.connections)

    def to_json(self) -> str:
        """The options as text, for the pipe to the daemon."""
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.steps is not None:
            body["steps"] = [self.steps.start, self.steps.stop]
        return json.dumps({name: str(v) if isinstance(v, Path) else v for name, v in body.items()})

    @classmethod
    def from_json(cls, text: str) -> MountOptions:
        """Inverse of `to_json`."""
        body = json.loads(text)
        for name in ("directory", "cache_dir"):
            body[name] = None if body[name] is None else Path(body[name])
        body["steps"] = None if body["steps"] is None else range(*body["steps"])
        body["ranks"] = None if body["ranks"] is None else tuple(body["ranks"])
        return cls(**body)

    def redacted(self) -> dict[str, object]:
        """The options as `.stepfs/config.json` may show them."""
        body: dict[str, object] = json.loads(self.to_json())
        body["lake"] = redact_url(self.lake)
        body["endpoint_url"] = None if self.endpoint_url is None else redact_url(self.endpoint_url)
        return body


def redact_url(url: str) -> str:
    """The URL without user, password and query, which may contain secrets; a path stays unchanged."""
    if url.startswith("file:"):
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def parse_steps(text: str) -> range:
    """`A:B` → steps A … B-1."""
    first, colon, end = text.partition(":")
    if not (colon and _is_number(first) and _is_number(end)) or not int(first) < int(end) <= STEP_MAX + 1:
        raise UsageError(f"--steps {text!r}: write A:B with A < B, for example 0:1000 (B is not included)")
    return range(Step(int(first)), Step(int(end)))


def parse_ranks(text: str) -> tuple[int, ...]:
    """`0-3,8` → (0, 1, 2, 3, 8); both ends included."""
    ranks: set[int] = set()
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)) or not int(first) <= int(last) <= RANK_MAX:
            raise UsageError(
                f"--ranks {text!r}: write ranks and ranges such as 0-7 or 0,2,4-5 (both ends included)"
            )
        ranks.update(range(int(first), int(last) + 1))
    return tuple(sorted(ranks))


def parse_duration(text: str) -> float:
    """`100ms`, `5s`, `2m`, `1h`, or a bare number of seconds → seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"duration {text!r}: write seconds, or a number with ms, s, m or h, for example 100ms"
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_interval(text: str) -> float:
    """The interval of a repeated action: at least a millisecond."""
    interval_s = parse_duration(text)
    if interval_s < INTERVAL_S_MIN:
        raise UsageError(f"interval {text!r} is too short: use at least 1ms")
    return interval_s


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 15
